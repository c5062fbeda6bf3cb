"""`kvhold control` sends the node's metrics to a real collector: what Prometheus gets, too."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry in this environment")
pytest.importorskip("opentelemetry.proto", reason="no protobuf classes of OTLP here")

from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from kvhold.control.otlp import _histogram
from kvhold.core.errors import ConfigError
from kvhold.core.metrics import TABLE, Metrics
from kvhold.net.messages import MetricSample
from kvhold.testing.cache import a_prompt, store
from tests.control.running import running_control
from tests.node.nodes import SPACE, RunningNode
from tests.otlp import Collector, values_of


@pytest.fixture
def collector(nothing_is_left: None) -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def metrics_of(request: Any) -> dict[str, Any]:
    (of_resource,) = request.resource_metrics
    assert values_of(of_resource.resource.attributes)["service.name"] == "kvhold-node"
    (scope,) = of_resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def is_up(request: Any) -> float:
    (point,) = metrics_of(request)["kvhold_up"].gauge.data_points
    return float(point.as_double)


async def test_the_metrics_are_sent_under_their_names(
    node: RunningNode, collector: Collector
) -> None:
    client = node.client()
    client.register(SPACE)
    prompt = a_prompt(SPACE, 160)
    store(client, prompt)
    with client.lookup(prompt.query()):
        pass
    sends = {"endpoint": collector.url, "metrics_interval_s": 0.05}
    async with running_control(node.path, otel=sends):
        await asyncio.to_thread(collector.until, lambda: len(collector.metrics) >= 2)
        first, second = (metrics_of(request) for request in collector.metrics[:2])
        node.kill()
        await asyncio.to_thread(collector.until, lambda: is_up(collector.metrics[-1]) == 0)
    assert is_up(collector.metrics[0]) == 1
    assert first.keys() <= TABLE.keys()
    hits = first["kvhold_hit_tokens"]
    (point,) = hits.sum.data_points
    assert (values_of(point.attributes), point.as_double) == ({"source": "ram"}, 160)
    assert hits.sum.is_monotonic and hits.description == TABLE["kvhold_hit_tokens"].help
    assert hits.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert (hits.unit, first["kvhold_stored_bytes"].unit) == ("{tokens}", "By")
    assert first["kvhold_uptime_seconds"].unit == "s"
    assert first["kvhold_chunks"].gauge.data_points[0].as_double == 10
    (later,) = second["kvhold_hit_tokens"].sum.data_points
    assert 0 < point.start_time_unix_nano == later.start_time_unix_nano < later.time_unix_nano


def test_a_histograms_buckets_are_not_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.003, 0.003, 31.0):
        metrics.observe("kvhold_tier_seconds", seconds, tier="disk", operation="get", size="1MiB")
    (sample,) = metrics.samples()
    point = _histogram(
        sample.metric,
        MetricSample(sample.metric.name, sample.labels, sample.value, sample.counts),
        0,
        1,
    )
    counts = dict(zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True))
    assert {edge: count for edge, count in counts.items() if count} == {
        0.0005: 1,
        0.005: 2,
        float("inf"): 1,
    }
    assert (point.count, point.sum) == (4, pytest.approx(31.0065))
    assert point.attributes == {"tier": "disk", "operation": "get", "size": "1MiB"}


async def test_an_export_can_be_off_and_a_wrong_one_is_refused(
    shared_node: RunningNode, collector: Collector
) -> None:
    sends = {"endpoint": collector.url, "metrics_interval_s": 0}
    async with running_control(shared_node.path, otel=sends) as control:
        assert (await control.ask("GET", "/health/ready"))[0] == 200
    assert not collector.metrics
    with pytest.raises(ConfigError, match=r"otel\.endpoint"):
        async with running_control(shared_node.path, otel={"endpoint": "collector:4318"}):
            pass


async def test_a_collector_that_hangs_holds_nobody_up(
    shared_node: RunningNode, collector: Collector
) -> None:
    collector.goes_on.clear()
    sends = {"endpoint": collector.url, "metrics_interval_s": 0.05}
    async with running_control(shared_node.path, otel=sends) as control:
        assert await asyncio.to_thread(collector.held.wait, 20)
        assert (await control.ask("GET", "/health/ready"))[0] == 200
        assert (await control.ask("GET", "/metrics"))[0] == 200
        # the end of the API does not wait for the answer either
        assert not collector.goes_on.is_set()
    assert not collector.metrics
