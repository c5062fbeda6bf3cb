"""What vllm-router counts for the chunks that a node announces, before engines that say nothing."""

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("zmq", reason="no pyzmq: pip install 'kvhold[events]'")

from kvhold.core.events_config import EventsConfig
from kvhold.core.metrics import Metrics
from kvhold.node.router_publisher import RouterPublisher
from tests.node.nodes import PATIENT_S, eventually
from tests.node.test_router_publisher import BLOCK, describe, key_of, settled
from tests.vllm.routing import WHY_NOT, VLLMRouter

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

NUM_BLOCKS = 10
TOKENS = NUM_BLOCKS * BLOCK
CREDITS = {0: 0.8, 1: 0.3, -1: 0.3}  # by place: memory, a disk, a shared store
_CREDITED = re.compile(r'KV prefix decision .*worker="(\S+)" .*credited_prefix_tokens=(\d+)')
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        self._answer({"id": "1", "object": "text_completion", "choices": [choice]})

    def log_message(self, format: str, *args: object) -> None: ...

    def _answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def engines() -> Iterator[list[str]]:
    """Their addresses."""
    with ExitStack() as stack:
        urls: list[str] = []
        for _ in range(2):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Engine))
            serving = threading.Thread(target=server.serve_forever)
            serving.start()
            stack.callback(serving.join)
            stack.callback(server.shutdown)
            urls.append(f"http://127.0.0.1:{server.server_port}")
        yield urls


@pytest.fixture
def publishers() -> Iterator[list[RouterPublisher]]:
    local = "tcp://127.0.0.1:0"
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            publisher = RouterPublisher(EventsConfig(publish=local, replay=local), Metrics())
            made.append(stack.enter_context(closing(publisher)))
            publisher.start()
        yield made


def ask(router: VLLMRouter, number: int) -> tuple[str, int]:
    """The engine that the router chose, and the tokens that it counted as there."""
    body = {"model": "demo", "prompt": [*tokens_of(number), 1], "max_tokens": 1}
    request = urllib.request.Request(
        f"{router.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    known = len(decisions(router))
    with urllib.request.urlopen(request, timeout=PATIENT_S):
        pass
    assert eventually(lambda: len(decisions(router)) > known)
    return decisions(router)[-1]


def tokens_of(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + TOKENS))


def decisions(router: VLLMRouter) -> list[tuple[str, int]]:
    log = _COLOURS.sub("", router.log.read_text())
    return [(worker, int(tokens)) for worker, tokens in _CREDITED.findall(log)]


def test_a_shared_store_counts_as_a_disk(
    engines: list[str], publishers: list[RouterPublisher]
) -> None:
    holder = publishers[1]
    numbers = dict(zip(CREDITS, (1, 2, 3), strict=True))
    for place, number in numbers.items():
        hashes = list(range(100 * number, 100 * number + NUM_BLOCKS))
        holder.describe([describe(number, list(hashes))])
        holder.note(key_of(number), place, True)
    settled(holder)
    flags = ["--policy", "kv_aware", "--kv-event-block-size", str(BLOCK)]
    flags += ["--kv-event-model", "demo", "--log-level", "debug"]
    for url, publisher in zip(engines, publishers, strict=True):
        flags += ["--kv-event-source", f"{url}={publisher.address}"]
        flags += ["--kv-event-replay-source", f"{url}={publisher.replay_address}"]
    with VLLMRouter("--worker-urls", *engines, *flags) as router:
        for place, number in numbers.items():

            def is_credited(place: int = place, number: int = number) -> bool:
                # a batch makes it ask for those that it has missed
                holder.describe([describe(4, [400])])
                for present in (False, True):
                    holder.note(key_of(4), 0, present)
                    settled(holder)
                return ask(router, number) == (engines[1], TOKENS * CREDITS[place])

            assert eventually(is_credited, within_s=PATIENT_S), (place, decisions(router))
        holder.note(b"", -1, False)
        settled(holder)
        assert eventually(lambda: ask(router, numbers[-1])[1] == 0, within_s=PATIENT_S)
