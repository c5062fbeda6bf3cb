"""The table of metrics, and counters that take no other name."""

import re
from pathlib import Path
from typing import Any

import pytest

import kvhold
from kvhold.core.metrics import TABLE, Metric, Metrics, merged_samples

SOURCES = Path(kvhold.__file__).parent


class TestTable:
    @pytest.mark.parametrize("metric", TABLE.values(), ids=lambda metric: metric.name)
    def test_every_line_is_complete(self, metric: Metric) -> None:
        assert re.fullmatch(r"kvhold_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.kind in ("counter", "gauge", "histogram")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.unit
        assert metric.help.endswith(".")
        assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)
        assert not metric.name.endswith("_total"), "exporters add what their system wants"

    def test_every_line_has_its_own_name(self) -> None:
        text = (SOURCES / "core" / "metrics_table.py").read_text()
        lines = re.findall(r'^        Metric\(\s*"|^    \("kvhold_', text, re.MULTILINE)
        assert len(lines) == len(TABLE)
        assert all(name == metric.name for name, metric in TABLE.items())

    def test_everything_that_is_counted_is_in_the_table(self) -> None:
        counted = {
            name
            for path in SOURCES.rglob("*.py")
            for name in re.findall(r'\.(?:add|set|observe)\(\s*"(kvhold_\w+)"', path.read_text())
        }
        assert counted
        assert counted <= set(TABLE)


class TestMetrics:
    def test_what_was_never_counted_is_zero(self) -> None:
        assert Metrics().value("kvhold_stored_chunks") == 0
        assert list(Metrics().samples()) == []

    def test_amounts_add_up_label_by_label(self) -> None:
        metrics = Metrics()
        metrics.add("kvhold_stored_chunks")
        metrics.add("kvhold_stored_chunks", 4)
        metrics.add("kvhold_hit_tokens", 10, source="ram")
        metrics.add("kvhold_hit_tokens", 5, source="disk")
        metrics.add("kvhold_hit_tokens", 1, source="ram")
        assert metrics.value("kvhold_stored_chunks") == 5
        assert metrics.value("kvhold_hit_tokens", source="ram") == 11
        assert metrics.value("kvhold_hit_tokens", source="disk") == 5

    def test_what_is_set_stands_as_it_was_set(self) -> None:
        metrics = Metrics()
        metrics.set("kvhold_stored_chunks", 5)
        metrics.set("kvhold_stored_chunks", 3)
        assert metrics.value("kvhold_stored_chunks") == 3

    def test_a_histogram_counts_what_is_at_most_each_bucket(self) -> None:
        metrics = Metrics()
        for seconds in (0.0004, 0.0005, 0.3, 100):
            metrics.observe("kvhold_tier_seconds", seconds, tier="r", operation="get", size="1MiB")
        (sample,) = metrics.samples()
        at_most = dict(zip((*sample.metric.buckets, None), sample.counts, strict=True))
        assert (
            at_most[0.0005],
            at_most[0.001],
            at_most[0.2],
            at_most[0.5],
            at_most[30.0],
            at_most[None],
        ) == (2, 2, 2, 3, 3, 4)
        assert metrics.as_dict() == {
            "kvhold_tier_seconds_count{tier=r,operation=get,size=1MiB}": 4,
            "kvhold_tier_seconds_sum{tier=r,operation=get,size=1MiB}": pytest.approx(100.3009),
        }

    def test_samples_come_in_the_order_of_the_table(self) -> None:
        metrics = Metrics()
        metrics.add("kvhold_protocol_errors", reason="b")
        metrics.add("kvhold_protocol_errors", reason="a")
        metrics.add("kvhold_lookup_requests", result="hit")
        metrics.add("kvhold_stored_bytes", 7)
        assert [(s.metric.name, s.labels, s.value) for s in metrics.samples()] == [
            ("kvhold_lookup_requests", ("hit",), 1),
            ("kvhold_stored_bytes", (), 7),
            ("kvhold_protocol_errors", ("a",), 1),
            ("kvhold_protocol_errors", ("b",), 1),
        ]

    def test_a_status_shows_name_and_labels(self) -> None:
        metrics = Metrics()
        metrics.add("kvhold_lookup_requests", 2, result="hit")
        metrics.add("kvhold_stored_bytes", 7)
        assert metrics.as_dict() == {
            "kvhold_lookup_requests{result=hit}": 2,
            "kvhold_stored_bytes": 7,
        }

    def test_a_status_shows_what_came_and_went_since_the_last_one(self) -> None:
        metrics = Metrics()
        metrics.add("kvhold_lookup_requests", result="hit")
        metrics.as_dict()
        metrics.forget("result", "hit")
        metrics.add("kvhold_lookup_requests", 3, result="miss")
        assert metrics.as_dict() == {"kvhold_lookup_requests{result=miss}": 3}

    @pytest.mark.parametrize(
        ("name", "labels"),
        [
            ("kvhold_no_such_thing", {}),
            ("stored_bytes", {}),
            ("kvhold_stored_bytes", {"tier": "ram"}),
            ("kvhold_hit_tokens", {}),
            ("kvhold_hit_tokens", {"reason": "ram"}),
            ("kvhold_hit_tokens", {"source": "ram", "tier": "ram"}),
        ],
    )
    def test_an_unknown_name_or_label_fails_at_once(
        self, name: str, labels: dict[str, Any]
    ) -> None:
        metrics = Metrics()
        for call in (
            metrics.add,
            lambda name, **labels: metrics.set(name, 1, **labels),
            metrics.value,
        ):
            with pytest.raises(KeyError):
                call(name, **labels)
        assert metrics.as_dict() == {}


def test_samples_of_several_threads_are_added() -> None:
    one, two = Metrics(), Metrics()
    for metrics, value in ((one, 0.001), (two, 0.3)):
        metrics.add("kvhold_lookup_tokens", 5)
        metrics.observe("kvhold_tier_seconds", value, tier="d", operation="probe", size="")
    two.add("kvhold_stored_chunks")
    found = {sample.metric.name: sample for sample in merged_samples([one, two])}
    assert found.keys() == {"kvhold_lookup_tokens", "kvhold_tier_seconds", "kvhold_stored_chunks"}
    assert found["kvhold_lookup_tokens"].value == 10
    seconds = found["kvhold_tier_seconds"]
    assert (seconds.counts[-1], round(seconds.value, 6)) == (2, 0.301)
    assert seconds.counts[0] == 0 and seconds.counts[5] == 1
