"""OpenAI servers on one host, and the engines of one, with the connector's name and nothing else
configured, share what they compute.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold_lab.engines.engine import options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.prompts import make_prompt
from tests.otlp import Collector, SentSpan

pytestmark = pytest.mark.vllm

CONNECTOR = {"kv_connector": "KVHoldConnector", "kv_role": "kv_both"}


@pytest.fixture
def runtime_folder(tmp_path: Path) -> Iterator[Path]:
    """Where the default socket is; the node that the servers start is ended."""
    yield tmp_path
    path = tmp_path / "kvhold" / "node.sock"
    if path.exists():
        with NodeClient(path, ClientConfig(), name="test") as client:
            client.stop_node()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def test_a_prompt_sent_to_one_server_is_a_hit_in_the_other(runtime_folder: Path) -> None:
    model = make_model("tiny")
    prompt = make_prompt(model.path, 1500)
    options = options_for(model, max_model_len=2048, kv_transfer_config=CONNECTOR, num_threads=1)
    environment = {"XDG_RUNTIME_DIR": str(runtime_folder)}
    one, two = (
        OpenAIServer(options, environment=environment),
        OpenAIServer(options, environment=environment),
    )
    try:
        with ThreadPoolExecutor(2) as starters:
            for started in [starters.submit(server.start) for server in (one, two)]:
                started.result()
        cold = one.complete(prompt, max_tokens=12)
        warm = two.complete(prompt, max_tokens=12)
        assert warm.token_ids == cold.token_ids
        assert warm.text == cold.text
        assert cold.num_cached_tokens == 0
        assert warm.num_cached_tokens == 1500 // 128 * 128
        assert two.metric("vllm:external_prefix_cache_hits_total") == 1500 // 128 * 128
        assert one.metric("vllm:external_prefix_cache_hits_total") == 0
    finally:
        one.stop()
        two.stop()
    with NodeClient(runtime_folder / "kvhold" / "node.sock", ClientConfig(), name="test") as client:
        assert client.status()["chunks"] > 0, "the node outlives its engines"


def test_what_one_of_a_servers_engines_has_computed_is_a_hit_in_the_other(
    runtime_folder: Path, collector: Collector
) -> None:
    """vLLM's data parallel engines. Each request's spans of vLLM and kvhold are in one trace."""
    model = make_model("tiny")
    prompt = make_prompt(model.path, 1500)
    options = options_for(model, max_model_len=2048, kv_transfer_config=CONNECTOR, num_threads=1)
    environment = {
        "XDG_RUNTIME_DIR": str(runtime_folder),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "KVHOLD_OTEL_ENDPOINT": collector.url,
    }
    flags = ["--otlp-traces-endpoint", f"{collector.url}/v1/traces"]
    with OpenAIServer(options, environment=environment, engines=2, flags=flags) as server:
        cold = server.complete(prompt, max_tokens=12, engine=0, headers=of_trace("a"))
        warm = server.complete(prompt, max_tokens=12, engine=1, headers=of_trace("b"))
        assert warm.token_ids == cold.token_ids
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 1500 // 128 * 128)
        hits = {
            name: value
            for name, value in server.metrics().items()
            if name.startswith("vllm:external_prefix_cache_hits_total")
        }
        assert sorted(hits.values()) == [0, 1500 // 128 * 128]
        for trace, hit_tokens, copied in (
            ("a", 0, "kvhold.store"),
            ("b", 1500 // 128 * 128, "kvhold.load"),
        ):
            found = spans_of(collector, trace, {copied, "kvhold.lookup"})
            own, vllms = found["kvhold.request"], found["llm_request"]
            assert own.parent == vllms.parent == 16 * trace
            assert found["kvhold.lookup"].parent == found[copied].parent == own.id
            assert own.attributes["kvhold.hit_tokens"] == hit_tokens
            request_id = vllms.attributes["gen_ai.request.id"]
            assert own.attributes["kvhold.request_id"].startswith(request_id)


def of_trace(digit: str) -> dict[str, str]:
    return {"traceparent": f"00-{32 * digit}-{16 * digit}-01"}


def spans_of(collector: Collector, digit: str, names: set[str]) -> dict[str, SentSpan]:
    """A trace's, once these have come, and the request's own."""

    def found() -> dict[str, SentSpan]:
        return {span.name: span for span in list(collector.spans) if span.trace == 32 * digit}

    collector.until(lambda: found().keys() >= names | {"kvhold.request", "llm_request"})
    return found()
