"""Two engines, each on a node of its own, routed by vllm-router: a prompt goes to the engine that
has its KV, and gets the hit that the router has counted on. The engines' own memory holds only some
of the prompts.
"""

import json
import random
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import msgspec
import zmq
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored, KVEventBatch

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold.node.start import end_node
from kvhold_lab.engines.engine import options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.servers.base import free_port
from tests.node.nodes import eventually, run_kvhold
from tests.vllm.routing import WHY_NOT, VLLMRouter
from tests.vllm.test_routers import BLOCK, CONNECTOR, PATIENT_S, make_body, prompt_tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.alone,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

OWN_TOKENS = 4_096  # of an engine's memory
NUM_PROMPTS = 12  # for each engine; more than that

_batches = msgspec.msgpack.Decoder(KVEventBatch)
_DECISION = re.compile(r'KV prefix decision .*worker="(\S+)" .*credited_prefix_tokens=(\d+)')
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def whole(self) -> int:
        return self.prompt_tokens // BLOCK * BLOCK


@dataclass
class Host:
    """events, replays: addresses by `node` and `engine`"""

    server: OpenAIServer
    socket: Path
    events: dict[str, str]
    replays: dict[str, str]

    @property
    def url(self) -> str:
        return self.server.base_url.removesuffix("/v1")

    def compute(self, number: int) -> list["Known"]:
        return [
            Known(self, path, body, post(self.url, path, body))
            for path, body in make_prompts(number)
        ]

    def in_memory(self) -> int:
        """Blocks at the node: each chunk is one."""
        with NodeClient(self.socket, ClientConfig(call_timeout_s=60), name="test") as client:
            return client.status()["chunks"]

    def announced(self, source: str) -> tuple[int, int]:
        """The latest batch's number, and the blocks in kvhold's memory."""
        held, numbers = set[Any](), [-1]
        for number, batch in replayed(self.replays[source]):
            numbers.append(number)
            for event in batch.events:
                if getattr(event, "medium", None) == MEDIUM_CPU:
                    is_new = isinstance(event, BlockStored)
                    (held.update if is_new else held.difference_update)(event.block_hashes)
        return numbers[-1], len(held)

    def move_to_disk(self, tokens: list[int], file: Path) -> None:
        with NodeClient(self.socket, ClientConfig(call_timeout_s=60), name="test") as client:
            [namespace] = client.status()["namespaces"]
        file.write_text(json.dumps(tokens))
        done = run_kvhold(
            *("move", namespace, "--tokens", str(file), "--tier", "disk"),
            *("--socket", str(self.socket)),
        )
        assert "5 left memory" in done.stdout, done


@dataclass
class Known:
    """A prompt that one engine has answered."""

    host: Host
    path: str
    body: dict[str, Any]
    answer: Answer


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    model = make_model("tiny")
    options = options_for(
        model,
        max_model_len=2_048,
        num_threads=1,
        kv_cache_bytes=OWN_TOKENS * model.kv_bytes_per_token,
        kv_transfer_config=CONNECTOR,
    )
    made: list[Host] = []
    with ExitStack() as stack:
        for _ in range(2):
            folder = tmp_path_factory.mktemp("host")
            stack.callback(end_node, folder / "kvhold" / "node.sock")
            events, replays = (
                {name: f"tcp://127.0.0.1:{free_port()}" for name in ("node", "engine")}
                for _ in range(2)
            )
            environment = {
                "XDG_RUNTIME_DIR": str(folder),
                "KVHOLD_RAM_BYTES": "256MiB",
                "KVHOLD_TIERS": f"disk://{folder}/disk?max_bytes=1GiB",
                "KVHOLD_EVENTS_PUBLISH": events["node"],
                "KVHOLD_EVENTS_REPLAY": replays["node"],
            }
            own = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                # vLLM connects to other addresses
                "endpoint": events["engine"].replace("127.0.0.1", "*"),
                "replay_endpoint": replays["engine"],
            }
            server = OpenAIServer(
                options,
                environment=environment,
                log_path=folder / "server.log",
                flags=["--enable-scale-out", "--kv-events-config", json.dumps(own)],
            )
            stack.callback(server.stop)
            made.append(Host(server, folder / "kvhold" / "node.sock", events, replays))
        with ThreadPoolExecutor(2) as starters:
            for started in [starters.submit(host.server.start, PATIENT_S) for host in made]:
                started.result()
        yield made


def post(url: str, path: str, body: dict[str, Any]) -> Answer:
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENT_S) as response:
        answer = json.load(response)
    [choice], usage = answer["choices"], answer["usage"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return Answer(text, usage["prompt_tokens"], cached)


def replayed(endpoint: str) -> Iterator[tuple[int, KVEventBatch]]:
    """All batches of a publisher, with their numbers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 60_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(endpoint)
        asking.send_multipart([b"", bytes(8)])
        while (frames := asking.recv_multipart())[-1]:
            yield int.from_bytes(frames[-2], "big"), _batches.decode(frames[-1])


def make_prompts(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies: half of them chats. The router looks no completion up that asks for ids."""
    made = []
    for chat in [False, True] * (number // 2):
        body = make_body(chat=chat, streamed=False)
        del body["return_token_ids"]
        made.append(("/v1/chat/completions" if chat else "/v1/completions", body))
    return made


def log_of(router: VLLMRouter) -> str:
    return _COLOURS.sub("", router.log.read_text())


def read_by(router: VLLMRouter, host: Host) -> int:
    """The number of the host's latest batch that the router has read; -1: none."""
    found = re.findall(rf"source={re.escape(host.url)} rank=0 seq=(\d+)", log_of(router))
    return int(found[-1]) if found else -1


def wait_until_followed(router: VLLMRouter, host: Host) -> None:
    def is_followed() -> bool:
        host.compute(2)
        return read_by(router, host) >= 0

    eventually(is_followed, within_s=PATIENT_S)


def wait_until_told(router: VLLMRouter, host: Host, source: str) -> None:
    """Until the router knows all that the node has in memory."""

    def is_told() -> bool:
        # an engine publishes when it steps
        post(host.url, "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})
        last, num_held = host.announced(source)
        return num_held == host.in_memory() and read_by(router, host) >= last

    eventually(is_told, within_s=PATIENT_S)


def hits(hosts: list[Host]) -> list[tuple[int, int]]:
    """Of each engine: tokens that it had itself, and those that kvhold had."""
    counted = [prompt_tokens(host.server) for host in hosts]
    return [(one["local_cache_hit"], one["external_kv_transfer"]) for one in counted]


def num_requests(hosts: list[Host]) -> list[float]:
    return [host.server.metric("vllm:request_prompt_tokens_count") for host in hosts]


@pytest.mark.parametrize("source", ["node", "engine"])
def test_by_events_a_prompt_goes_where_its_kv_is(
    hosts: list[Host], source: str, tmp_path: Path
) -> None:
    """The engines got the prompts without the router, half of them before its start. The node also
    tells of those that are only on its disk.
    """
    flags = [
        "--policy",
        "kv_aware",
        "--kv-event-block-size",
        str(BLOCK),
        "--kv-event-model",
        "demo",
    ]
    flags += ["--kv-penalty-host", "1.0", "--kv-penalty-disk", "1.0", "--log-level", "debug"]
    for host in hosts:
        flags += ["--kv-event-source", f"{host.url}={host.events[source]}"]
        flags += ["--kv-event-replay-source", f"{host.url}={host.replays[source]}"]
    known = [one for host in hosts for one in host.compute(NUM_PROMPTS // 2)]
    with VLLMRouter("--worker-urls", *(host.url for host in hosts), *flags) as router:
        moved = [one for one in known if source == "node" and "prompt" in one.body]
        for one in moved:
            one.host.move_to_disk(one.body["prompt"], tmp_path / "tokens.json")
        for host in hosts:
            wait_until_followed(router, host)
            known += host.compute(NUM_PROMPTS // 2)
            wait_until_told(router, host, source)
        random.Random(0).shuffle(known)
        before = hits(hosts)
        for number, one in enumerate(known, 1):
            answer = post(router.url, one.path, one.body)
            assert answer.text == one.answer.text
            decisions = _DECISION.findall(log_of(router))
            assert len(decisions) == number
            assert decisions[-1] == (one.host.url, str(one.answer.whole))
            assert answer.cached_tokens == one.answer.whole
    for host, now, earlier in zip(hosts, hits(hosts), before, strict=True):
        own, held = (value - was for value, was in zip(now, earlier, strict=True))
        promised = sum(one.answer.whole for one in known if one.host is host)
        print(f"{source}: {promised} tokens promised, {own} in the engine, {held} in kvhold")
        assert own + held == promised
        assert held > 0


def test_without_events_a_prompt_goes_where_it_was(hosts: list[Host]) -> None:
    """The policy `cache_aware` remembers where it has sent a text; it spreads new ones by load."""
    flags = ["--policy", "cache_aware", "--balance-abs-threshold", "0"]
    prompts = make_prompts(2 * NUM_PROMPTS)
    with VLLMRouter("--worker-urls", *(host.url for host in hosts), *flags) as router:
        before = num_requests(hosts)
        with ThreadPoolExecutor(2) as senders:
            first = list(senders.map(lambda prompt: post(router.url, *prompt), prompts))
        assert all(now > earlier for now, earlier in zip(num_requests(hosts), before, strict=True))
        held_before = [held for _, held in hits(hosts)]
        again = [post(router.url, path, body) for path, body in prompts]
    assert [one.cached_tokens for one in first] == [0] * len(first)
    assert [one.text for one in again] == [one.text for one in first]
    assert [one.cached_tokens for one in again] == [one.whole for one in first]
    assert sum(held for _, held in hits(hosts)) > sum(held_before)
