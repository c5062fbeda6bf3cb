"""Spans reach a real collector, follow the request's trace, and never make anybody wait."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry in this environment")
pytest.importorskip("opentelemetry.proto", reason="no protobuf classes of OTLP here")

import msgspec

from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError, ProtocolError
from kvhold.core.otel_config import OtelConfig
from kvhold.core.setting import apply
from kvhold.core.tracing import OpenSpan, Tracer
from kvhold.net import messages as m
from kvhold.net.wire import Decoder
from kvhold.node import otel
from kvhold.node.otel import collector_of, make_tracer
from kvhold.testing.cache import a_prompt, store
from tests.node.fleets import Fleet, eventually_read, fleet, joined, peers, port_of
from tests.node.nodes import SPACE, eventually
from tests.node.test_tiers import on_disk
from tests.otlp import Collector

__all__ = ["fleet"]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"
WRONG = ["", "x", SAMPLED[:-3], f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "é" * 55]


@pytest.fixture
def collector(nothing_is_left: None) -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


class Traced:
    """A tracer, and what was counted."""

    def __init__(self, collector: Collector, **settings: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        given = {"endpoint": collector.url, "send_interval_s": 0.02} | settings
        tracer = make_tracer(apply(OtelConfig(), given, source="test"), "test", self._count)
        assert tracer is not None
        self.tracer: Tracer = tracer

    def _count(self, result: str, num_spans: int) -> None:
        with self._lock:
            self.counts[result] += num_spans

    def begin(self, name: str = "one", parent: str = SAMPLED) -> OpenSpan:
        span = self.tracer.begin(name, parent, {})
        assert span is not None
        return span


class TestParents:
    def test_a_request_joins_the_trace_of_its_headers(self, collector: Collector) -> None:
        traced = Traced(collector)
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
        request = traced.tracer.begin_request("request", headers, {"kvhold.request_id": "r1"})
        assert request is not None
        child = traced.tracer.begin(
            "child", request.context, {"kvhold.tier": "disk"}, links=[SAMPLED, "wrong"]
        )
        assert child is not None
        child.end({"kvhold.bytes": 4096}, fault="it broke")
        child.end({"kvhold.bytes": 1})
        request.end()
        traced.tracer.close()
        sent = {span.name: span for span in collector.spans}
        assert sent.keys() == {"request", "child"} and len(collector.spans) == 2
        assert {span.trace for span in sent.values()} == {TRACE}
        assert sent["request"].parent == PARENT
        assert sent["request"].attributes == {"kvhold.request_id": "r1"}
        assert sent["child"].parent == sent["request"].id
        assert sent["child"].attributes == {"kvhold.tier": "disk", "kvhold.bytes": 4096}
        assert sent["child"].links == ((TRACE, PARENT),)
        assert (sent["child"].fault, sent["request"].fault) == ("it broke", "")
        assert sent["request"].began_ns <= sent["child"].began_ns <= sent["child"].ended_ns
        assert {span.service for span in sent.values()} == {"test"}
        assert traced.counts == {"exported": 2}

    @pytest.mark.parametrize("headers", [None, {}, *({"traceparent": text} for text in WRONG)])
    def test_without_a_trace_a_request_begins_one(
        self, collector: Collector, headers: dict[str, str] | None
    ) -> None:
        traced = Traced(collector)
        span = traced.tracer.begin_request("request", headers, {})
        assert span is not None
        span.end()
        traced.tracer.close()
        assert [one.parent for one in collector.spans] == [""]

    @pytest.mark.parametrize("parent", [*WRONG, UNSAMPLED])
    def test_a_child_of_nothing_is_not_recorded(self, collector: Collector, parent: str) -> None:
        traced = Traced(collector)
        assert traced.tracer.begin("child", parent, {}) is None
        traced.tracer.close()
        assert not collector.spans

    def test_sampling_follows_the_parent_and_then_the_ratio(self, collector: Collector) -> None:
        never = Traced(collector, sample_ratio=0)
        assert never.tracer.begin_request("request", None, {}) is None
        kept = never.tracer.begin_request("request", {"traceparent": SAMPLED}, {})
        assert kept is not None
        kept.end()
        never.tracer.close()
        always = Traced(collector)
        assert always.tracer.begin_request("request", {"traceparent": UNSAMPLED}, {}) is None
        always.tracer.close()
        assert [span.trace for span in collector.spans] == [TRACE]

    def test_times_of_the_monotonic_clock_become_unix_time(self, collector: Collector) -> None:
        from time import monotonic, time_ns

        traced = Traced(collector)
        before_ns, began_s = time_ns(), monotonic()
        span = traced.tracer.begin("one", SAMPLED, {}, began_s=began_s - 60)
        assert span is not None
        span.end(ended_s=began_s - 30)
        traced.tracer.close()
        (sent,) = collector.spans
        assert sent.ended_ns - sent.began_ns == pytest.approx(30e9, rel=1e-3)
        assert sent.began_ns == pytest.approx(before_ns - 60e9, abs=5e9)

    def test_a_context_has_a_length(self) -> None:
        decoder: Decoder[m.Lookup] = Decoder(m.Lookup)
        lookup = m.Lookup(a_prompt(SPACE, 64).query(), trace=SAMPLED)
        assert decoder.decode(msgspec.msgpack.encode(lookup)) == lookup
        longer = msgspec.structs.replace(lookup, trace=f"{SAMPLED}-")
        with pytest.raises(ProtocolError):
            decoder.decode(msgspec.msgpack.encode(longer))


class TestBounds:
    def test_spans_beyond_the_bound_are_dropped_and_counted(self, collector: Collector) -> None:
        collector.goes_on.clear()  # it takes nothing
        traced = Traced(collector, max_waiting_spans=8)
        traced.begin().end()
        assert collector.held.wait(20)
        for _ in range(20):
            traced.begin().end()
        assert traced.counts == {"dropped": 13}
        collector.goes_on.set()
        eventually(lambda: traced.counts["exported"] == 8)
        traced.begin("later").end()
        traced.tracer.close()
        assert traced.counts == {"dropped": 13, "exported": 9}
        assert Counter(span.name for span in collector.spans) == {"one": 8, "later": 1}

    def test_refused_spans_are_counted_and_later_ones_arrive(
        self, collector: Collector, caplog: pytest.LogCaptureFixture
    ) -> None:
        collector.status = 400
        traced = Traced(collector)
        traced.begin().end()
        eventually(lambda: traced.counts["failed"] == 1)
        collector.status = 200
        traced.begin("later").end()
        eventually(lambda: traced.counts["exported"] == 1)
        traced.tracer.close()
        assert [span.name for span in collector.spans] == ["later"]
        said = [
            record.getMessage() for record in caplog.records if record.name == "kvhold.node.tracing"
        ]
        assert said == [f"kvhold: {collector.url}/v1/traces does not take spans; they are lost"]

    def test_closing_does_not_wait_for_a_collector_that_hangs(self, collector: Collector) -> None:
        collector.goes_on.clear()
        traced = Traced(collector)
        traced.begin().end()
        traced.tracer.close()
        assert not collector.goes_on.is_set() and not collector.spans
        collector.goes_on.set()
        eventually(lambda: collector.spans)  # it was sent, and nobody waited

    def test_headers_are_sent(self, collector: Collector) -> None:
        traced = Traced(collector, headers={"Authorization": "Bearer%20abc", "x-team": "kv"})
        traced.begin().end()
        traced.tracer.close()
        (headers,) = collector.headers
        assert (headers["authorization"], headers["x-team"]) == ("Bearer abc", "kv")
        assert headers["content-type"] == "application/x-protobuf"


def test_a_nodes_reads_from_tiers_and_peers_are_children_of_the_lookup(
    fleet: Fleet, collector: Collector, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"otel.endpoint": collector.url, "otel.send_interval_s": 0.02}
    disk = on_disk(tmp_path)
    writer = joined(fleet.start("a", disk, **settings))
    written = [a_prompt(SPACE, 160, seed) for seed in (1, 2)]
    for prompt in written:
        store(writer, prompt)
    assert writer.flush()
    writer.close()
    fleet.nodes[0].close()
    assert not collector.spans, "what nobody traces has no spans"
    peer = fleet.start("p", port=0)
    at_the_peer = [a_prompt(SPACE, 96, seed) for seed in (3, 4)]
    for prompt in at_the_peer:
        store(joined(peer), prompt)
    tiers = f"faults+{disk}&faults=get:error:@2:denied", peers(port_of(peer))
    reader = joined(fleet.start("b", *tiers, **settings))

    with reader.lookup(written[0].query(), trace=SAMPLED) as hit:
        assert hit.num_tokens == 160
    probe, read = (collector.one(f"kvhold.tier.{name}") for name in ("probe", "read"))
    for span in (probe, read):
        assert (span.trace, span.parent, span.service) == (TRACE, PARENT, "kvhold-node")
        assert span.attributes["kvhold.tier"] == "disk" and not span.fault
        chunks, found = span.attributes["kvhold.chunks"], span.attributes["kvhold.found_chunks"]
        assert (chunks, found) == (10, 10)
    assert read.attributes["kvhold.bytes"] > 10 * 16 * 1536
    assert "kvhold.reason" not in read.attributes
    assert probe.began_ns <= probe.ended_ns <= read.began_ns <= read.ended_ns

    with reader.lookup(written[1].query(), trace=SAMPLED) as hit:
        assert hit.num_tokens == 0
    failed = collector.one("kvhold.tier.read", kvhold_reason="tier_down")
    assert failed.attributes["kvhold.found_chunks"] == 0

    eventually_read(reader, at_the_peer[0])  # not traced; it follows the peer now
    with reader.lookup(at_the_peer[1].query(), trace=SAMPLED) as hit:
        assert hit.num_tokens == 96
    of_tier = collector.one("kvhold.tier.read", kvhold_tier="peers")
    of_peer = collector.one("kvhold.peer.read")
    assert (of_peer.trace, of_peer.parent) == (TRACE, of_tier.id)
    assert of_peer.attributes["kvhold.peer"] == f"127.0.0.1:{port_of(peer)}"
    assert of_peer.attributes["kvhold.chunks"] == 6
    assert of_peer.attributes["kvhold.bytes"] == of_tier.attributes["kvhold.bytes"]
    assert of_tier.began_ns <= of_peer.began_ns <= of_peer.ended_ns <= of_tier.ended_ns

    exported = "kvhold_spans{result=exported}"
    eventually(lambda: reader.status()["tier_counters"].get(exported) == len(collector.spans))
    assert not [name for name in reader.status()["tier_counters"] if "dropped}" in name]


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"endpoint": "localhost:4318"}, "otel.endpoint.*is not the URL"),
            ({"endpoint": "ftp://h:1"}, "otel.endpoint.*is not the URL"),
            ({"endpoint": "http://h:port"}, "otel.endpoint.*is not the URL"),
            ({"endpoint": "http://"}, "otel.endpoint.*is not the URL"),
            ({"endpoint": "http://u:p@h:1"}, "write secrets to otel.headers"),
            ({"endpoint": "http://h:1", "headers": ("a=secret",)}, "clear text.*otel.insecure"),
            ({"endpoint": "https://h:1", "headers": ("secret",)}, "NAME=VALUE"),
            ({"endpoint": "https://h:1", "headers": ("a=secret%0Ab",)}, "the value of a"),
            ({"endpoint": "https://h:1", "headers": ("a=secret b",)}, "write %20.*value of a"),
            ({"endpoint": "https://h:1", "ca_file": "/nothing"}, "otel.ca_file.*/nothing"),
        ],
    )
    def test_a_wrong_setting_names_itself_and_tells_no_secret(
        self, settings: dict[str, Any], told: str
    ) -> None:
        with pytest.raises(ConfigError, match=told) as error:
            collector_of(OtelConfig(**settings), "test")
        assert "secret" not in str(error.value).replace("secrets", "")

    def test_headers_may_go_over_tls_or_loopback_or_where_it_is_allowed(self) -> None:
        for endpoint, insecure in (
            ("https://collector.example", False),
            ("http://127.0.0.1:4318", False),
            ("http://[::1]:4318/", False),
            ("http://collector.example:4318", True),
        ):
            config = load_config(
                {"otel": {"endpoint": endpoint, "headers": {"a": "b"}, "insecure": insecure}},
                environ={},
            ).otel
            collector = collector_of(config, "test")
            assert collector.headers == {"a": "b"}
            assert collector.path("traces") == f"{endpoint.rstrip('/')}/v1/traces"
            assert "'b'" not in repr(collector)

    def test_it_is_off_by_default_and_may_be_off_for_traces_alone(self) -> None:
        assert make_tracer(OtelConfig(), "test", print) is None
        config = OtelConfig(endpoint="http://127.0.0.1:1", traces=False)
        assert make_tracer(config, "test", print) is None

    def test_without_opentelemetry_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "kvhold.node.tracing", raising=False)
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        with pytest.raises(ConfigError, match=r"pip install 'kvhold\[otel\]'"):
            otel.make_tracer(OtelConfig(endpoint="http://127.0.0.1:1"), "test", print)

    def test_off_nothing_of_it_is_imported(self) -> None:
        code = (
            "import sys\n"
            "from kvhold.node.server import Node\n"
            "from kvhold.node import NodeClient\n"
            "import kvhold.control.server\n"
            "print(any(name.startswith('opentelemetry') for name in sys.modules))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout == "False\n"
