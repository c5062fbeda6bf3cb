"""Prefill and decode engines with kvhold, on one node, behind other projects' routers: vllm-router,
and the requests of llm-d's sidecar. Each answer is that of one engine alone, and the decode engine
computes only what no whole block ends with.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold.node.start import end_node
from kvhold_lab.engines.engine import options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.prompts import make_prompt
from tests.vllm.routing import WHY_NOT, VLLMRouter
from tests.vllm.sidecar import CONNECTORS, PREFILLER, Sidecar, decode_body, prefill_body
from tests.vllm.test_proxy import send, tokens_of

PATIENT_S = 600.0
BLOCK = 128
NUM_TOKENS = 700
MAX_TOKENS = 8
MOST_PROMPTS = 5  # a busy machine may answer a lookup, or store a prompt, too late
CONNECTOR = {
    "kv_connector": "KVHoldConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "client": {"handover_grace_s": PATIENT_S, "handover_timeout_s": PATIENT_S}
    },
}
Post = Callable[[str, dict[str, Any]], list[int]]


@dataclass
class Engines:
    socket: Path
    alone: OpenAIServer
    prefill: OpenAIServer
    decode: OpenAIServer


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Each test needs prompts of its own."""
    folder, model = tmp_path_factory.mktemp("host"), make_model("tiny")
    size = {"max_model_len": 2_048, "num_threads": 1}
    size["kv_cache_bytes"] = 4 * 2_048 * model.kv_bytes_per_token
    pair = options_for(model, kv_transfer_config=CONNECTOR, **size)
    environment = {"XDG_RUNTIME_DIR": str(folder), "KVHOLD_RAM_BYTES": "512MiB"}
    socket = folder / "kvhold" / "node.sock"
    with ExitStack() as stack:
        stack.callback(end_node, socket)
        servers = [
            OpenAIServer(options, environment=environment, log_path=folder / f"server{n}.log")
            for n, options in enumerate((options_for(model, **size), pair, pair))
        ]
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(2) as starters:
            for started in [starters.submit(server.start, PATIENT_S) for server in servers]:
                started.result()
        yield Engines(socket, *servers)


def address(server: OpenAIServer) -> str:
    return server.base_url.removesuffix("/v1").removeprefix("http://")


prompts = count(10_000)


def make_body(*, chat: bool, streamed: bool, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    prompt = make_prompt(make_model("tiny").path, num_tokens, seed=next(prompts))
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": streamed,
    }
    if streamed:
        body["stream_options"] = {"include_usage": True}
    if not chat:
        return body | {"prompt": prompt}
    text = " ".join(f"word{token}" for token in prompt[: num_tokens // 3])
    return body | {"messages": [{"role": "user", "content": text}]}


def prompt_tokens(server: OpenAIServer) -> dict[str, int]:
    """By source, since the start."""
    begin = "vllm:prompt_tokens_by_source_total{"
    return {
        name.rpartition('source="')[2].removesuffix('"}'): int(value)
        for name, value in server.metrics().items()
        if name.startswith(begin)
    }


def handovers_read(engines: Engines) -> int:
    """Prompts that were kept for a decode engine until it asked for them, since the start."""
    with NodeClient(engines.socket, ClientConfig(call_timeout_s=PATIENT_S), name="test") as client:
        return int(client.status()["counters"].get("kvhold_handovers{result=read}", 0))


def hand_over(
    engines: Engines,
    post: Post,
    *,
    chat: bool,
    streamed: bool,
    is_named: bool = True,
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Post prompts until one is handed over; any answer must be right.

    is_named: the engines are told of each other. Then the whole prompt is handed over, whose last
    token is computed again without being counted; else whole blocks
    """
    path = "/v1/chat/completions" if chat else "/v1/completions"
    counted = []
    for _ in range(MOST_PROMPTS):
        body = make_body(chat=chat, streamed=streamed, num_tokens=num_tokens)
        before = prompt_tokens(engines.prefill), prompt_tokens(engines.decode)
        read_before = handovers_read(engines)
        answer = post(path, body)
        assert answer == send(f"http://{address(engines.alone)}", path, body)
        assert len(answer) == MAX_TOKENS
        prefilled, decoded = (
            {source: value - earlier[source] for source, value in prompt_tokens(server).items()}
            for server, earlier in zip((engines.prefill, engines.decode), before, strict=True)
        )
        asked = sum(decoded.values())
        assert prefilled == {
            "local_compute": asked,
            "local_cache_hit": 0,
            "external_kv_transfer": 0,
        }
        handed = asked if is_named else asked // BLOCK * BLOCK
        counted.append(decoded)
        if decoded == {
            "local_compute": asked - handed,
            "local_cache_hit": 0,
            "external_kv_transfer": handed,
        }:
            assert asked >= min(num_tokens, 5 * BLOCK)
            assert handovers_read(engines) == read_before + is_named
            return
    raise AssertionError(counted)


KINDS = pytest.mark.parametrize(
    ("chat", "streamed"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["completion", "streamed completion", "chat", "streamed chat"],
)


@pytest.fixture(scope="module")
def router(engines: Engines) -> Iterator[VLLMRouter]:
    prefill, decode = (f"http://{address(one)}" for one in (engines.prefill, engines.decode))
    with VLLMRouter(
        "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode
    ) as running:
        yield running


@pytest.mark.vllm
@pytest.mark.alone
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
class TestVLLMRouter:
    @KINDS
    def test_its_decode_engine_gets_the_prompt_from_its_prefill_engine(
        self, engines: Engines, router: VLLMRouter, chat: bool, streamed: bool
    ) -> None:
        def post(path: str, body: dict[str, Any]) -> list[int]:
            return send(router.url, path, body)

        hand_over(engines, post, chat=chat, streamed=streamed)

    def test_a_prompt_of_less_than_a_block_is_handed_over(
        self, engines: Engines, router: VLLMRouter
    ) -> None:
        def post(path: str, body: dict[str, Any]) -> list[int]:
            return send(router.url, path, body)

        hand_over(engines, post, chat=False, streamed=False, num_tokens=BLOCK - 1)


@pytest.mark.vllm
@pytest.mark.alone
class TestSidecar:
    """llm-d's."""

    @pytest.mark.parametrize("connector", CONNECTORS)
    @KINDS
    def test_its_decode_engine_gets_the_prompt_from_its_prefill_engine(
        self, engines: Engines, connector: str, chat: bool, streamed: bool
    ) -> None:
        sidecar = Sidecar(connector, address(engines.decode))
        headers = {"Content-Type": "application/json", PREFILLER: address(engines.prefill)}

        def post(path: str, body: dict[str, Any]) -> list[int]:
            text = sidecar.post(path, headers, json.dumps(body).encode())
            return tokens_of(text, streamed=streamed)

        is_named = connector in ("nixlv2", "offloading")
        hand_over(engines, post, chat=chat, streamed=streamed, is_named=is_named)

    def test_without_its_header_the_decode_engine_computes(self, engines: Engines) -> None:
        before = prompt_tokens(engines.prefill)
        body = make_body(chat=False, streamed=False)
        text = Sidecar("nixlv2", address(engines.decode)).post(
            "/v1/completions", {"Content-Type": "application/json"}, json.dumps(body).encode()
        )
        alone = send(f"http://{address(engines.alone)}", "/v1/completions", body)
        assert tokens_of(text, streamed=False) == alone
        assert prompt_tokens(engines.prefill) == before


CLIENTS = b'{"stream": true, "prompt": [5, 17], "temperature": 0.0, "model": "a<b>&\xc3\xa9",\
 "stream_options": {"include_usage": true}, "max_tokens": 12, "top_p": 0.25}'
BEGIN = b'"model":"a\\u003cb\\u003e\\u0026\xc3\xa9","prompt":[5,17],'
OPTIONS = b'"stream":true,"stream_options":{"include_usage":true},"temperature":0,"top_p":0.25}'


@pytest.mark.parametrize(
    ("connector", "prefill", "decode"),
    [
        (
            "nixlv2",
            b'{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
            b'"remote_block_ids":null,"remote_engine_id":null,"remote_host":null,'
            b'"remote_port":null},"max_completion_tokens":1,"max_tokens":1,"min_tokens":1,'
            + BEGIN
            + b'"stream":false,"temperature":0,"top_p":0.25}',
            b'{"kv_transfer_params":{"a":[],"b":640},"max_tokens":12,' + BEGIN + OPTIONS,
        ),
        (
            "shared-storage",
            b'{"cache_hit_threshold":0,"max_completion_tokens":1,"max_tokens":1,' + BEGIN + OPTIONS,
            b'{"cache_hit_threshold":0,"max_tokens":12,' + BEGIN + OPTIONS,
        ),
        (
            "offloading",
            b'{"kv_transfer_params":{"remote_decoder":{"kv_request_id":"id"}},"max_tokens":1,'
            + BEGIN
            + b'"stream":false,"temperature":0,"top_p":0.25}',
            b'{"kv_transfer_params":{"remote_prefiller":{"kv_request_id":"id",'
            b'"remote_host":"10.0.0.7","remote_port":7777}},"max_tokens":12,' + BEGIN + OPTIONS,
        ),
        (
            "lmcache",
            b'{"max_completion_tokens":1,"max_tokens":1,' + BEGIN + OPTIONS,
            CLIENTS,
        ),
    ],
)
def test_the_sidecars_bodies(connector: str, prefill: bytes, decode: bytes) -> None:
    assert prefill_body(connector, CLIENTS, "id") == prefill
    answer = b'{"kv_transfer_params": {"b": 640, "a": []}}'
    assert decode_body(connector, CLIENTS, "id", "10.0.0.7", answer) == decode
