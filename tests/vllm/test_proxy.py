"""Prefill and decode engines behind the proxy answer as one engine alone: two of each, on one node,
with random requests, 8 at a time, some of whose clients leave. With each protocol the requests have
another salt, so nothing is found that was handed over before. The soak's own requests come last but
one.
"""

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold.node.start import end_node
from kvhold_lab.bench.soak.handover_requests import HandoverRequest, HandoverRequests
from kvhold_lab.bench.soak.handovers import HandoverEngines
from kvhold_lab.bench.soak.handovers import answer_all as answer_soak
from kvhold_lab.engines.engine import options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.prompts import make_prompt
from kvhold_lab.servers.proxy import ProxyProcess
from tests.node.nodes import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.alone]

AT_ONCE = 8
REQUESTS = 40
SOAK_REQUESTS = 90
MOST_TOKENS = 1_500
MAX_TOKENS = 8
PATIENT_S = 600.0
CONNECTOR = {
    "kv_connector": "KVHoldConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "rules": {"wait_for_computing": True},
        "client": {"handover_timeout_s": 10},
    },
}
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}


@dataclass
class Engines:
    socket: Path
    prefill: list[OpenAIServer]
    decode: list[OpenAIServer]
    expected: list[list[int]]
    soak_requests: list[HandoverRequest]


def make_requests(
    salt: str, params: dict[str, Any] | None = None, *, streams: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies: token ids and chats; half of them streamed, or none; short and long."""
    model, chance = make_model("tiny"), random.Random(0)
    made = []
    for number in range(REQUESTS):
        length = 1 if number == 0 else chance.randint(1, MOST_TOKENS)
        prompt = make_prompt(model.path, length, seed=1_000 + number)
        body: dict[str, Any] = {
            "model": "demo",
            "max_tokens": MAX_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": number % 2 == 0 and streams,
            "prompt": prompt,
            "cache_salt": salt,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        path = "/v1/completions"
        if number % 4 == 3:
            path = "/v1/chat/completions"
            text = " ".join(f"word{token}" for token in body.pop("prompt")[:300])
            body["messages"] = [{"role": "user", "content": text}]
        made.append((path, body))
    return made


def send(url: str, path: str, body: dict[str, Any], *, leave: bool = False) -> list[int]:
    """Return the tokens of the answer; leave: close the connection at once."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        if leave:
            return []
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
    finally:
        connection.close()
    return tokens_of(text, streamed=body["stream"])


def tokens_of(text: str, *, streamed: bool) -> list[int]:
    """Of an answer's body."""
    if not streamed:
        return list(json.loads(text)["choices"][0]["token_ids"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [
        token
        for event in events[:-1]
        for choice in json.loads(event)["choices"]
        for token in choice.get("token_ids") or ()
    ]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder, model = tmp_path_factory.mktemp("host"), make_model("tiny")
    size = {"max_model_len": 2_048, "num_threads": 1}
    size["kv_cache_bytes"] = 4 * 2_048 * model.kv_bytes_per_token
    with OpenAIServer(options_for(model, **size)) as alone:
        [url] = urls([alone])
        expected = [send(url, path, body) for path, body in make_requests("alone")]
        soak_requests = list(HandoverRequests(alone, seed=1).draw(SOAK_REQUESTS))
    options = options_for(model, kv_transfer_config=CONNECTOR, **size)
    environment = {"XDG_RUNTIME_DIR": str(folder), "KVHOLD_RAM_BYTES": "512MiB"}
    socket = folder / "kvhold" / "node.sock"
    with ExitStack() as stack:
        stack.callback(end_node, socket)
        servers = [
            OpenAIServer(options, environment=environment, log_path=folder / f"server{n}.log")
            for n in range(4)
        ]
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(2) as starters:
            for started in [starters.submit(server.start, PATIENT_S) for server in servers]:
                started.result()
        yield Engines(socket, servers[:2], servers[2:], expected, soak_requests)


def urls(servers: list[OpenAIServer]) -> list[str]:
    return [server.base_url.removesuffix("/v1") for server in servers]


def answer_all(
    proxy: ProxyProcess,
    requests: list[tuple[str, dict[str, Any]]],
    kills: dict[int, OpenAIServer] | None = None,
) -> list[list[int]]:
    """Send all requests, 8 at a time. After every fifth one, another client leaves at once.

    kills: servers, each by the number of the request before which it is killed
    """
    with ThreadPoolExecutor(AT_ONCE) as senders:
        answers: list[Future[list[int]]] = []
        for number, (path, body) in enumerate(requests):
            if number in (kills or {}):
                assert kills is not None
                answers[number - AT_ONCE].result()
                kills[number].kill()
            answers.append(senders.submit(send, proxy.url, path, body))
            if number % 5 == 4:
                senders.submit(send, proxy.url, path, body, leave=True)
        return [answer.result() for answer in answers]


def held_after(proxy: ProxyProcess) -> dict[str, float]:
    """Return the proxy's metrics once no request is in progress."""
    eventually(lambda: proxy.metrics()["kvhold_proxy_running"] == 0, within_s=PATIENT_S)
    counted = proxy.metrics()
    print({name: value for name, value in counted.items() if "total" in name})
    assert counted["kvhold_proxy_held_bytes"] == 0
    return counted


def assert_nothing_is_held(engines: Engines) -> None:
    with NodeClient(engines.socket, ClientConfig(call_timeout_s=60), name="test") as client:
        eventually(lambda: client.status()["held"] == NOTHING, within_s=PATIENT_S)


HANDS_OVER = {"KVHOLD_PROXY_MIN_PREFILL_TOKENS": "128", "KVHOLD_PROXY_SKIP_ANSWERED_S": "0"}


def with_peers(urls: list[str]) -> list[str]:
    """The protocol p2p wants an address; kvhold's engines do not use it."""
    return [f"{url}?p2p=127.0.0.1:9" for url in urls]


@pytest.mark.parametrize("protocol", ["shared", "nixl", "p2p"])
def test_two_prefill_and_two_decode_engines_answer_as_one_alone(
    engines: Engines, protocol: str
) -> None:
    settings = HANDS_OVER | {"KVHOLD_PROXY_PROTOCOL": protocol}
    hits = [server.metric("vllm:external_prefix_cache_hits_total") for server in engines.decode]
    # only what the protocol itself awaits
    params = None if protocol == "shared" else {"kvhold": {"wait_for_computing": False}}
    prefill = urls(engines.prefill)
    if protocol == "p2p":
        prefill = with_peers(prefill)
    with ProxyProcess(prefill, urls(engines.decode), **settings) as proxy:
        assert answer_all(proxy, make_requests(protocol, params)) == engines.expected
        counted = held_after(proxy)
    assert counted['kvhold_proxy_prefills_total{result="short"}'] >= 1
    assert counted['kvhold_proxy_prefills_total{result="done"}'] >= REQUESTS // 2
    assert 'kvhold_proxy_prefills_total{result="failed"}' not in counted
    for server, before in zip(engines.decode, hits, strict=True):
        loaded = server.metric("vllm:external_prefix_cache_hits_total") - before
        print(f"{loaded:.0f} tokens were handed over")
        assert loaded > 0
    assert_nothing_is_held(engines)


def test_messages_and_models_pass(engines: Engines) -> None:
    """The second of equal messages has no prefill part, and the same answer."""
    body = {
        "model": "demo",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "word " * 200}],
    }
    with ProxyProcess(urls(engines.prefill), urls(engines.decode)) as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENT_S)
        try:
            headers = {"Content-Type": "application/json"}
            answers = []
            for _ in range(2):
                connection.request("POST", "/v1/messages", json.dumps(body), headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
                assert (response.status, answer["type"]) == (200, "message"), answer
                answers.append(answer["content"])
            assert answers[0] == answers[1] != []
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            assert json.loads(response.read())["data"][0]["id"] == "demo"
        finally:
            connection.close()
        found = proxy.metrics()
        for result in ("done", "hit"):
            assert found[f'kvhold_proxy_prefills_total{{result="{result}"}}'] == 1


def test_clients_that_leave_in_all_stages_change_no_token_and_leave_nothing_held(
    engines: Engines,
) -> None:
    """A short `kvhold bench soak handovers`."""
    parts = HandoverEngines(engines.prefill, engines.decode, [engines.socket])
    found = answer_soak(parts, engines.soak_requests)
    assert found.passed, found
    assert (found.requests, found.wrong, found.errors) == (SOAK_REQUESTS, 0, 0)
    assert (found.held_bytes, found.held) == (0, {})
    stages = found.cancelled_in
    assert min(stages["queued"] + stages["prefill"], stages["between"], stages["decode"]) > 0


def test_no_request_fails_and_no_token_changes_when_engines_are_killed(engines: Engines) -> None:
    """Both prefill engines, then a decode engine, while the two parts of requests run at once. No
    other test comes after this one.
    """
    kills = {
        10: engines.prefill[0],
        20: engines.prefill[1],
        30: engines.decode[0],
    }
    settings = HANDS_OVER | {"KVHOLD_PROXY_PROTOCOL": "p2p"}
    prefill = with_peers(urls(engines.prefill))
    with ProxyProcess(prefill, urls(engines.decode), **settings) as proxy:
        requests = make_requests("killed", streams=False)
        assert answer_all(proxy, requests, kills) == engines.expected
        counted = held_after(proxy)
    for role, number in (("prefill", 0), ("prefill", 1), ("decode", 0)):
        engine = urls(getattr(engines, role))[number].removeprefix("http://")
        sample = f'kvhold_proxy_engine_usable{{engine="{engine}",role="{role}"}}'
        assert counted[sample] == 0
    assert_nothing_is_held(engines)
