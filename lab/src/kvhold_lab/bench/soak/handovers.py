"""Random requests behind `kvhold proxy`, a third with each protocol. Clients leave in all stages.

Answers count up to the first near tie.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

from kvhold.core.config import ClientConfig
from kvhold.core.status import NodeStatus
from kvhold.node import NodeClient
from kvhold_lab.bench.pd.faults import KVHOLD, PdAnswer, PdConditions, PdShape, count_held
from kvhold_lab.bench.pd.pair import START_S, PdPair, alone, wait_until
from kvhold_lab.bench.pd.requests import FOR_DECODER, post, send, send_prefill
from kvhold_lab.bench.second_host import second_host
from kvhold_lab.bench.soak.handover_requests import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    LEAVE_STAGES,
    LONGEST_ANSWER,
    LONGEST_PROMPT,
    HandoverRequest,
    HandoverRequests,
)
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.preloaded import VARIABLE, preloading
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.servers.proxy import ProxyProcess

PROTOCOLS = ("nixl", "p2p", "shared")
_AT_ONCE = 8
_RUNNING = 6
_HELD_PROMPTS = 6
_DEADLINE_S = 300.0
_FREE_WITHIN_S = 60.0
_FIRST_TTFT_S = 0.3
_PREFILL_SHARE = 0.7  # of a first token's time
_SHOWN = 10
_PATIENT = ClientConfig(connect_timeout_s=60.0, call_timeout_s=60.0)
_LOADED = "vllm:external_prefix_cache_hits_total"
_USED_BLOCKS = "vllm:kv_cache_usage_perc"
_PROXY = {
    "KVHOLD_PROXY_MIN_PREFILL_TOKENS": "16",
    "KVHOLD_PROXY_SKIP_ANSWERED_S": "0",
    "KVHOLD_PROXY_PREFILL_TIMEOUT_S": "300",
    "KVHOLD_PROXY_QUEUE_TIMEOUT_S": "300",
}
_STAGES_OF_PROXY = {"before": "queued", "prefill": "prefill", "decode": "decode"}


@dataclass(frozen=True)
class HandoverSoak:
    """wrong, errors, held_bytes and held must be 0 or empty, and each protocol hands tokens over.

    handed_over_tokens: loaded by the decode engines
    handed_over_with:   the same, by protocol
    held_bytes:         at the end, by proxies; with `held`, also the nodes' memory
    """

    prefill: int
    decode: int
    hosts: int
    requests: int
    cancelled: int
    cancelled_in: dict[str, int]
    wrong: int
    errors: int
    handed_over_tokens: int
    handed_over_with: dict[str, int]
    held_bytes: int
    held: dict[str, int]
    details: list[str]
    seconds: float
    passed: bool


@dataclass(frozen=True)
class HandoverSoaks:
    rows: list[HandoverSoak]
    passed: bool


@dataclass(frozen=True)
class HandoverEngines:
    prefill: Sequence[OpenAIServer]
    decode: Sequence[OpenAIServer]
    sockets: Sequence[Path]

    @property
    def handed_tokens(self) -> int:
        return sum(int(engine.metric(_LOADED)) for engine in self.decode)

    def held(self) -> dict[str, int]:
        held = Counter(count_held(map(_status, self.sockets)))
        for engine in (*self.prefill, *self.decode):
            held["engines with blocks in use"] += engine.metric(_USED_BLOCKS) > 0
        return {kind: num for kind, num in held.items() if num}


def run(
    num_requests: int,
    seed: int,
    *,
    shape: PdShape,
    hosts: int = 1,
    with_smaller: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> HandoverSoaks:
    """with_smaller: also smaller shapes. Raises EngineFailed; NoSecondHost."""
    shapes = [
        PdShape(prefill, decode)
        for prefill in range(1 if with_smaller else shape.prefill, shape.prefill + 1)
        for decode in range(1 if with_smaller else shape.decode, shape.decode + 1)
    ]
    model = make_model("tiny")
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-handovers-") as folder,
        second_host() if hosts > 1 else nullcontext() as host,
        _preloaded(),
    ):
        say(f"one engine alone answers {num_requests} requests ...")
        with alone(model, Path(folder), threads=1).start(START_S) as server:
            requests = list(HandoverRequests(server, seed).draw(num_requests))
        say(f"starting the engines of {shape.name} ...")
        with PdPair(
            model,
            Path(folder),
            KVHOLD,
            PdConditions(two_nodes=hosts > 1),
            threads=1,
            max_tokens=LONGEST_PROMPT + LONGEST_ANSWER,
            held_prompts=_HELD_PROMPTS,
            shape=shape,
            second_host=host,
            tokens_per_block=BLOCK_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
        ) as pair:
            rows = []
            for one in shapes:
                say(f"{one.name}:")
                engines = HandoverEngines(
                    pair.servers("prefill")[: one.prefill],
                    pair.servers("decode")[: one.decode],
                    pair.sockets,
                )
                salted = [replace(each, salt=f"{one.name} {each.salt}") for each in requests]
                rows.append(answer_all(engines, salted, hosts=hosts, say=say))
                say(f"{rows[-1]}")
            return HandoverSoaks(rows, all(row.passed for row in rows))


def answer_all(
    engines: HandoverEngines,
    requests: Sequence[HandoverRequest],
    *,
    hosts: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> HandoverSoak:
    """Raises EngineFailed."""
    began_s, tally, handed = time.monotonic(), _Tally(), dict[str, int]()
    for number, protocol in enumerate(PROTOCOLS):
        part = requests[number :: len(PROTOCOLS)]
        say(f"{len(part)} requests with {protocol} ...")
        before = engines.handed_tokens
        address = "?p2p=127.0.0.1:9" if protocol == "p2p" else ""
        running = -(-_RUNNING // len(engines.decode))
        with ProxyProcess(
            [_url(engine) + address for engine in engines.prefill],
            [_url(engine) for engine in engines.decode],
            **_PROXY,
            KVHOLD_PROXY_PROTOCOL=protocol,
            KVHOLD_PROXY_MAX_RUNNING=str(running),
        ) as proxy:
            sender = _Sender(proxy.url, engines)
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                for request, answer in zip(part, threads.map(sender.send, part), strict=True):
                    tally.judge(request, answer, protocol)
            tally.end(proxy)
        handed[protocol] = engines.handed_tokens - before
    held: dict[str, int] = {"silent nodes or engines": 1}

    def is_free() -> bool:
        nonlocal held
        held = engines.held()
        return not held

    wait_until(is_free, _FREE_WITHIN_S)
    if held:
        tally.held_bytes += sum(_status(socket)["used_bytes"] for socket in engines.sockets)
    return HandoverSoak(
        prefill=len(engines.prefill),
        decode=len(engines.decode),
        hosts=hosts,
        requests=len(requests),
        cancelled=tally.left.total(),
        cancelled_in={stage: tally.left[stage] for stage in LEAVE_STAGES},
        wrong=tally.wrong,
        errors=tally.errors,
        handed_over_tokens=sum(handed.values()),
        handed_over_with=handed,
        held_bytes=tally.held_bytes,
        held=held,
        details=tally.details[:_SHOWN],
        seconds=round(time.monotonic() - began_s, 1),
        passed=all(handed.values())
        and not (tally.wrong or tally.errors or tally.held_bytes or held),
    )


@dataclass
class _Tally:
    wrong: int = 0
    errors: int = 0
    held_bytes: int = 0
    left: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def judge(self, request: HandoverRequest, answer: PdAnswer, protocol: str) -> None:
        expected, name = request.expected, f"request {request.number} ({protocol})"
        stays = request.leaves is None and not answer.error
        if answer.tokens != (expected if stays else expected[: len(answer.tokens)]):
            self.wrong += 1
            self.details.append(f"{name}: {answer.tokens} is not {expected}")
        self.left["between"] += request.leaves == "between" and not answer.error
        if answer.error:
            self.errors += 1
            self.details.append(f"{name}: {answer.error}")

    def end(self, proxy: ProxyProcess) -> None:
        def is_idle() -> bool:
            found = proxy.metrics()
            return not (found["kvhold_proxy_running"] or found["kvhold_proxy_queued"])

        wait_until(is_idle, _FREE_WITHIN_S)
        found = proxy.metrics()
        self.held_bytes += int(found["kvhold_proxy_held_bytes"])
        for of_proxy, stage in _STAGES_OF_PROXY.items():
            sample = f'kvhold_proxy_clients_left_total{{stage="{of_proxy}"}}'
            self.left[stage] += int(found.get(sample, 0))


class _Sender:
    def __init__(self, url: str, engines: HandoverEngines) -> None:
        self._url = url
        self._engines = engines
        self._ttfts_s = [_FIRST_TTFT_S]
        self._numbers = count()

    def send(self, request: HandoverRequest) -> PdAnswer:
        if request.leaves == "between":
            return self._send_first_part(request)
        if request.leaves in ("queued", "prefill"):
            return self._leave_early(request)
        answer = send(
            self._url,
            request,
            request.salt,
            deadline_s=_DEADLINE_S,
            leave_after=request.leave_after,
        )
        if len(request.expected) == 1:
            self._ttfts_s.append(answer.seconds)
        return answer

    def _leave_early(self, request: HandoverRequest) -> PdAnswer:
        try:
            body = request.body(request.salt)
            with closing(post(self._url, body, timeout_s=_DEADLINE_S)):
                if request.leaves == "prefill":
                    longest_s = _PREFILL_SHARE * median(self._ttfts_s[-_AT_ONCE:])
                    time.sleep(request.leave_share * longest_s)
        except OSError as fault:
            return PdAnswer(request.number, [], 0.0, repr(fault))
        return PdAnswer(request.number, [], 0.0)

    def _send_first_part(self, request: HandoverRequest) -> PdAnswer:
        number = next(self._numbers)
        prefill = self._engines.prefill[number % len(self._engines.prefill)]
        decode = self._engines.decode[number % len(self._engines.decode)]
        leg = partial(send_prefill, _url(prefill), request, request.salt)
        try:
            params = leg(FOR_DECODER, timeout_s=_DEADLINE_S)
            if request.leave_share < 0.5:
                body = request.body(request.salt, params or None)
                post(_url(decode), body, timeout_s=_DEADLINE_S).close()
        except (EngineFailed, OSError) as fault:
            return PdAnswer(request.number, [], 0.0, repr(fault))
        return PdAnswer(request.number, [], 0.0)


@contextmanager
def _preloaded() -> Iterator[None]:
    if VARIABLE in os.environ:
        yield
        return
    with preloading() as folder:
        os.environ[VARIABLE] = str(folder)
        try:
            yield
        finally:
            del os.environ[VARIABLE]


def _url(engine: OpenAIServer) -> str:
    return engine.base_url.removesuffix("/v1")


def _status(socket: Path) -> NodeStatus:
    with NodeClient(socket, _PATIENT, name="kvhold bench") as client:
        return client.status()
