"""Spans of requests under vLLM's real scheduler, with the real connector of a worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")
pytest.importorskip("opentelemetry.proto", reason="no protobuf classes of OTLP here")

from tests.otlp import Collector, SentSpan
from tests.vllm.engines import (
    MakeEngine,
    engine,
    engines_on,
    forget_locally,
    node,
    store,
    tokens_held,
)
from tests.vllm.scheduling import (
    WITHIN_S,
    Engine,
    NodeProcess,
    damage,
    eventually,
    make_prompt,
)

__all__ = ["engine", "node"]
pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

CLIENT = {"traceparent": f"00-{'1f' * 16}-{'2e' * 8}-01"}
BLOCK_BYTES = 2 * 16 * 64 * 4  # two layers


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def sends_to(collector: Collector, **settings: Any) -> dict[str, Any]:
    return {"otel": {"endpoint": collector.url, "send_interval_s": 0.02} | settings}


def ask(engine: Engine, name: str, prompt: list[int], **changes: Any) -> None:
    engine.add(name, prompt, max_tokens=1, **changes)
    engine.run()


def of(collector: Collector, request: str) -> dict[str, SentSpan]:
    """All spans of a request, once its own has come."""
    root = collector.one("kvhold.request", kvhold_request_id=request)
    return {span.name: span for span in collector.spans if span.trace == root.trace}


def test_a_request_has_its_lookup_load_and_store_in_its_own_trace(
    collector: Collector, engine: MakeEngine
) -> None:
    one = engine(real_worker=True, settings=sends_to(collector))
    prompt = make_prompt("traced", 200)
    store(one, prompt)
    stored = collector.one("kvhold.store", kvhold_request_id="store-0")
    assert stored.attributes["kvhold.stored_chunks"] == 3
    assert stored.attributes["kvhold.bytes"] == 12 * BLOCK_BYTES
    first = of(collector, "store-0")
    assert first["kvhold.request"].parent == "" and stored.parent == first["kvhold.request"].id
    assert first["kvhold.lookup"].attributes["kvhold.reason"] == "never_stored"

    ask(one, "traced", prompt, trace_headers=CLIENT)
    eventually(lambda: not {"kvhold.load", "kvhold.lookup"} - of(collector, "traced").keys())
    found = of(collector, "traced")
    request, lookup, load = (found[f"kvhold.{name}"] for name in ("request", "lookup", "load"))
    assert (request.trace, request.parent) == ("1f" * 16, "2e" * 8)
    assert lookup.parent == load.parent == request.id
    assert {span.service for span in found.values()} == {"kvhold-engine"}
    assert request.attributes == {
        "kvhold.request_id": "traced",
        "kvhold.prompt_tokens": 200,
        "kvhold.status": "finished_length_capped",
        "kvhold.hit_tokens": 192,
        "kvhold.tokens_from.ram": 192,
        "kvhold.reason": "below_minimum",
    }
    namespace = one.connector.scheduler._namespace
    assert lookup.attributes["kvhold.namespace"] == namespace.digest.hex()
    assert lookup.attributes["kvhold.hit_tokens"] == 192
    assert load.attributes["kvhold.bytes"] == 12 * BLOCK_BYTES
    assert load.attributes["kvhold.failed_blocks"] == 0 and not load.fault
    assert request.began_ns <= lookup.began_ns <= lookup.ended_ns <= load.ended_ns
    assert load.began_ns <= load.ended_ns <= request.ended_ns


def test_a_damaged_chunk_is_a_fault_of_the_load(collector: Collector, engine: MakeEngine) -> None:
    one = engine(real_worker=True, settings=sends_to(collector))
    prompt = make_prompt("damaged", 200)
    store(one, prompt)
    damage(one, prompt, chunk=1)
    ask(one, "damaged", prompt)
    load = collector.one("kvhold.load", kvhold_request_id="damaged")
    assert load.fault and load.attributes["kvhold.failed_blocks"] == 4


def test_an_unsampled_request_has_no_spans(
    collector: Collector, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(real_worker=True, settings=sends_to(collector, sample_ratio=0))
    tally = one.connector.scheduler.tally
    monkeypatch.setattr(tally, "take", lambda: None)  # a step would begin the counts again
    prompt = make_prompt("unsampled", 200)
    store(one, prompt)
    ask(one, "silent", prompt, trace_headers={"traceparent": CLIENT["traceparent"][:-1] + "0"})
    forget_locally(one)
    ask(one, "traced", prompt, trace_headers=CLIENT)
    eventually(lambda: len(of(collector, "traced")) >= 3)
    assert {span.trace for span in collector.spans} == {"1f" * 16}
    eventually(lambda: tally._counts.get("spans:exported") == 2)


def test_a_request_that_is_given_up_ends_its_spans(
    collector: Collector, engine: MakeEngine, node: NodeProcess
) -> None:
    one = engine(settings=sends_to(collector))
    node.hold_up()
    try:
        one.add("gone", make_prompt("gone", 200))
        one.step()
        one.abort("gone")
    finally:
        node.go_on()
    lookup = collector.one("kvhold.lookup")
    assert lookup.attributes["kvhold.reason"] == "given_up"
    request = collector.one("kvhold.request", kvhold_status="finished_aborted")
    assert lookup.parent == request.id
    one.run()


def test_arriving_chunks_are_a_span_with_the_nodes_reads_in_it(
    folder: Path, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"disk://{tmp_path}/kv?max_bytes=1GiB&get_timeout_s=60"
    prompt = make_prompt("below", 300)
    for name, faults in (("writer", ""), ("reader", "&faults=get:delay:1:50ms")):
        with monkeypatch.context() as patched:
            patched.setenv("KVHOLD_TIERS", f"faults+{url}{faults}" if faults else url)
            patched.setenv("KVHOLD_OTEL_ENDPOINT", collector.url)
            patched.setenv("KVHOLD_OTEL_SEND_INTERVAL_S", "0.02")
            below = NodeProcess(tmp_path / f"{name}.sock")
        made = engines_on(below, folder)
        try:
            settings = sends_to(collector) if name == "reader" else {}
            one = next(made)(real_worker=True, settings=settings)
            if name == "writer":
                store(one, prompt)
                assert one.connector.scheduler._cache.flush(deadline_s=WITHIN_S)
                assert tokens_held(one, prompt) >= 256
            else:
                ask(one, "below", prompt, trace_headers=CLIENT)
                collector.one("kvhold.tier.read")
            assert next(made, None) is None
        finally:
            below.go_on()
            below.kill()
    arrival = collector.one("kvhold.arrival")
    lookup = collector.one("kvhold.lookup", kvhold_tokens_from_disk=288)
    probe, read = (collector.one(f"kvhold.tier.{name}") for name in ("probe", "read"))
    assert {span.trace for span in (arrival, lookup, probe, read)} == {"1f" * 16}
    assert {span.parent for span in (arrival, probe, read)} == {lookup.id}
    assert arrival.attributes["kvhold.hit_tokens_before"] == 0
    assert arrival.attributes["kvhold.hit_tokens"] == 288
    assert not arrival.attributes["kvhold.waits_for_engine"]
    assert read.service == "kvhold-node"
    assert lookup.began_ns <= read.began_ns <= read.ended_ns <= lookup.ended_ns


def test_loads_and_stores_inside_a_pass_have_their_spans(
    collector: Collector, engine: MakeEngine
) -> None:
    settings = sends_to(collector) | {"layerwise": True}
    one = engine(real_worker=True, caching=False, settings=settings)
    prompt = make_prompt("layerwise", 200)
    for name in ("cold", "warm"):
        ask(one, name, prompt, trace_headers={"traceparent": "of no version" * 100})
        eventually(lambda: not one.connector.scheduler._cache.status()["held"]["reservations"])
    load = collector.one("kvhold.load")
    assert load.attributes["kvhold.request_id"] == "warm" and load.attributes["kvhold.layerwise"]
    assert load.attributes["kvhold.bytes"] == 12 * BLOCK_BYTES and not load.fault
    store_span = collector.one("kvhold.store", kvhold_request_id="cold")
    assert store_span.attributes["kvhold.bytes"] == 12 * BLOCK_BYTES
    assert of(collector, "warm")["kvhold.request"].parent == ""
