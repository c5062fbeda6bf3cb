"""What the connector counts for vLLM adds up, and comes out at Prometheus."""

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from pathlib import Path

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvhold.core.reasons import REASONS
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.stats import METRICS, Stats, Tally
from tests.vllm.scheduling import Options, make_config, make_folder

pytestmark = pytest.mark.vllm


def test_every_token_of_a_lookup_is_found_or_missed() -> None:
    tally = Tally()
    tally.looked_up(1000, sources={"ram": 512, "disk": 256}, reason="evicted")
    tally.looked_up(300, sources={}, reason="never_stored")
    tally.looked_up(64, sources={"ram": 64}, reason="whole")
    stats = tally.take()
    assert stats is not None
    assert stats.data == {
        "lookup_tokens": 1364,
        "hit_tokens:ram": 576,
        "hit_tokens:disk": 256,
        "missed_tokens:evicted": 232,
        "missed_tokens:never_stored": 300,
    }
    assert tally.take() is None, "what was taken is not counted again"


def test_counts_of_workers_are_added() -> None:
    total = Stats({"loads": 1}).aggregate(Stats({"loads": 2, "hit_tokens:ram": 5}))
    assert total.reduce() == {"hit_tokens:ram": 5, "loads": 3}
    total.reset()
    assert total.is_empty()


def test_prometheus_has_them_with_vllms_labels(tmp_path: Path) -> None:
    config = make_config(Options(make_folder(tmp_path / "model")), Path("unused"))
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    try:
        prom.observe({"hit_tokens:disk": 7, "loads": 2}, engine_idx=1)
        prom.observe(
            {"hit_tokens:disk": 3, "missed_tokens:evicted": 4, "of another version": 1},
            engine_idx=1,
        )
        value = prometheus_client.REGISTRY.get_sample_value
        labels = {"model_name": "m", "engine": "1"}
        assert value("vllm:kvhold_hit_tokens_total", labels | {"source": "disk"}) == 10
        assert value("vllm:kvhold_missed_tokens_total", labels | {"reason": "evicted"}) == 4
        assert value("vllm:kvhold_loads_total", labels) == 2
    finally:
        assert prom.prom_metrics is not None
        for counter in prom.prom_metrics._counters.values():
            prometheus_client.REGISTRY.unregister(counter)


def test_vllms_log_has_them(tmp_path: Path) -> None:
    logging = KVConnectorLogging(
        make_config(Options(make_folder(tmp_path / "model")), Path("unused")).kv_transfer_config
    )
    lines: list[str] = []
    logging.observe({"loads": 1})
    logging.observe({"loads": 2})
    logging.log(lambda form, text: lines.append(form % text))
    assert lines == ["KV Transfer metrics: loads=3"]


def test_a_metric_without_a_label_takes_none() -> None:
    with pytest.raises(AssertionError):
        Tally().add("loads", 1, "ram")
    with pytest.raises(AssertionError):
        Tally().add("hit_tokens", 1)
    assert {labels for labels, _ in METRICS.values()} == {
        (),
        ("source",),
        ("reason",),
        ("result",),
        ("action", "outcome"),
    }
    assert REASONS and KVHoldConnector.build_kv_connector_stats().is_empty()
