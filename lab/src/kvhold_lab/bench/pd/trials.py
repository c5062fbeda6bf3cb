"""Carries out `kvhold bench pd --faults`.

Each fault has its own salt. One that did not come in time is tried once more. A client whose proxy
is killed sends its request again.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvhold.core.errors import KVHoldError
from kvhold_lab.bench.pd.faults import (
    KVHOLD,
    ONE_EACH,
    USUAL,
    PdAnswer,
    PdConditions,
    PdFault,
    PdFaultRow,
    PdProtocol,
    PdShape,
    by_conditions,
    judge,
)
from kvhold_lab.bench.pd.pair import (
    AT_ONCE,
    NIXL_LEASE_S,
    START_S,
    PdPair,
    Role,
    alone,
    wait_until,
)
from kvhold_lab.bench.pd.requests import (
    FOR_DECODER,
    PdRequest,
    ask_alone,
    post,
    send,
    send_prefill,
)
from kvhold_lab.bench.second_host import SecondHost
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.servers.proxy import ProxyProcess

_PREFILLED_WITHIN_S = 30.0
_SEEN_WITHIN_S = 60.0
_LEAVE_S = 1.0
_ATTEMPTS = 2
_PROXY = {
    "KVHOLD_PROXY_MIN_PREFILL_TOKENS": "128",
    "KVHOLD_PROXY_SKIP_ANSWERED_S": "0",
    "KVHOLD_PROXY_PREFILL_TIMEOUT_S": "5",
    "KVHOLD_PROXY_QUEUE_TIMEOUT_S": "2",
    "KVHOLD_PROXY_PROBE_MAX_INTERVAL_S": "1",
}
_SAME_ID = "kvhold-bench-pd"


@dataclass(frozen=True)
class PdWork:
    """deadline_s:   of a request
    second_host:  of the prefill engines, in faults with two nodes
    """

    model: ModelInfo
    num_requests: int
    threads: int
    deadline_s: float
    seed: int
    shape: PdShape = ONE_EACH
    second_host: SecondHost | None = None


class PdTrial:
    def __init__(
        self,
        pair: PdPair,
        fault: PdFault,
        requests: Sequence[PdRequest],
        deadline_s: float,
        attempt: int = 0,
    ) -> None:
        self._attempt = attempt
        self.pair = pair
        self.fault = fault
        self.requests = list(requests)
        self.deadline_s = deadline_s
        self.answers: list[PdAnswer] = []
        self.notes: list[str] = []
        self._senders = ThreadPoolExecutor(AT_ONCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._senders.shutdown(cancel_futures=True)

    @property
    def halves(self) -> tuple[list[PdRequest], list[PdRequest]]:
        middle = (len(self.requests) + 1) // 2
        return self.requests[:middle], self.requests[middle:]

    @contextmanager
    def proxy(self, protocol: PdProtocol | None = None) -> Iterator[ProxyProcess]:
        """protocol: None: the fault's"""
        protocol = protocol or self.fault.protocol
        if self.pair.system != KVHOLD:
            protocol = "nixl"
        address = "?p2p=127.0.0.1:9" if protocol == "p2p" else ""
        prefill = [url + address for url in self.pair.urls("prefill")]
        settings = _PROXY | {"KVHOLD_PROXY_PROTOCOL": protocol}
        with ProxyProcess(prefill, self.pair.urls("decode"), **settings) as proxy:
            yield proxy

    def send(self, url: str, requests: Sequence[PdRequest]) -> list[Future[PdAnswer]]:
        return [
            self._senders.submit(send, url, request, self.salt(), deadline_s=self.deadline_s)
            for request in requests
        ]

    def collect(self, sent: Sequence[Future[PdAnswer]], *, may_fail: bool = False) -> None:
        self.answers += [replace(one.result(), may_fail=may_fail) for one in sent]

    def send_legs(
        self, requests: Sequence[PdRequest], salt: str, *, times: int = 1
    ) -> list[list[dict[str, Any]]]:
        """Return the prefill parts' parameters, `times` for each request.

        Raises EngineFailed.
        """
        leg = partial(send_prefill, self.pair.url("prefill"), salt=salt, timeout_s=self.deadline_s)
        sent = [
            [self._senders.submit(leg, request, params=FOR_DECODER) for _ in range(times)]
            for request in requests
        ]
        return [[one.result() for one in of_request] for of_request in sent]

    def send_decode(
        self, request: PdRequest, salt: str, params: dict[str, Any], request_id: str = ""
    ) -> Future[PdAnswer]:
        return self._senders.submit(
            send,
            self.pair.url("decode"),
            request,
            salt,
            deadline_s=self.deadline_s,
            params=params,
            request_id=request_id,
        )

    def send_peer_leg(self, request: PdRequest, salt: str) -> Future[dict[str, Any]]:
        return self._senders.submit(
            send_prefill,
            self.pair.url("prefill"),
            request,
            salt,
            {"remote_decoder": {"kv_request_id": _SAME_ID}},
            timeout_s=self.deadline_s,
            request_id=_SAME_ID,
        )

    def await_prefill(self) -> None:
        if not self.pair.await_prefill():
            self.notes.append("the prefill engine was not seen computing")

    def await_prefilled(self, proxy: ProxyProcess, count: int) -> None:
        done = 'kvhold_proxy_prefills_total{result="done"}'
        if not wait_until(lambda: proxy.metrics().get(done, 0) >= count, _PREFILLED_WITHIN_S):
            self.notes.append(f"fewer than {count} prompts were computed before the fault")

    def await_usable(self, proxy: ProxyProcess, role: Role) -> None:
        def is_usable() -> bool:
            return all(
                value == 1
                for name, value in proxy.metrics().items()
                if name.startswith("kvhold_proxy_engine_usable{") and f'role="{role}"' in name
            )

        if not wait_until(is_usable, _SEEN_WITHIN_S):
            self.notes.append(f"the proxy does not use the new {role} engine")

    def salt(self, part: int = 0) -> str:
        return f"{self.pair.system}, {self.fault.name}, {self._attempt}, {part}"


def fault_rows(
    work: PdWork, names: Sequence[str], systems: Sequence[str], say: Callable[[str], None]
) -> Iterator[PdFaultRow]:
    """Raises EngineFailed: engines do not start."""
    with tempfile.TemporaryDirectory(prefix="kvhold-pd-") as own:
        folder = Path(own)
        say(f"one engine alone answers {work.num_requests} requests ...")
        with alone(work.model, folder, threads=work.threads).start(START_S) as server:
            requests = ask_alone(server, work.model, work.num_requests, seed=work.seed)
        for system in systems:
            for conditions, faults in by_conditions(names, system):
                how = "" if conditions == USUAL else f" with {_shown(conditions)}"
                say(f"starting the engines of {work.shape.name}, {system}{how} ...")
                with PdPair(
                    work.model,
                    folder,
                    system,
                    conditions,
                    threads=work.threads,
                    shape=work.shape,
                    second_host=work.second_host,
                ) as pair:
                    for fault in faults:
                        for attempt in range(_ATTEMPTS):
                            pair.start_missing()
                            row = try_fault(pair, fault, requests, work.deadline_s, attempt)
                            # a wrong or leaking try is not tried away
                            if row.was_made or not row.is_clean:
                                break
                        yield row


def try_fault(
    pair: PdPair,
    fault: PdFault,
    requests: Sequence[PdRequest],
    deadline_s: float,
    attempt: int = 0,
) -> PdFaultRow:
    """A failed step counts as an error of each unanswered request."""
    before, broken = pair.handed_tokens(), ""
    with PdTrial(pair, fault, requests, deadline_s, attempt) as trial:
        try:
            TRIALS[fault.name](trial)
        except (KVHoldError, OSError, RuntimeError) as error:
            broken = f"{type(error).__name__}: {error}"
            answered = {answer.number for answer in trial.answers}
            trial.answers += [
                PdAnswer(request.number, [], 0.0, broken)
                for request in requests
                if request.number not in answered
            ] or [PdAnswer(requests[0].number, [], 0.0, broken)]
    is_same = pair.are_running("decode") and not fault.name.startswith("decoder")
    return judge(
        fault.name,
        pair.system,
        trial.answers,
        {request.number: request.expected for request in requests},
        deadline_s=deadline_s,
        held=pair.held_at_end(),
        notes=trial.notes,
        handed_tokens=pair.handed_tokens() - before if is_same else None,
    )


def _shown(conditions: PdConditions) -> str:
    if conditions.two_nodes:
        return "two nodes"
    return "a tiny arena" if conditions.tiny_arena else "short leases"


def _plain(trial: PdTrial) -> None:
    with trial.proxy() as proxy:
        trial.collect(trial.send(proxy.url, trial.requests))


def _short_leases(trial: PdTrial) -> None:
    protocols: tuple[PdProtocol, PdProtocol] = ("nixl", "p2p")
    for protocol, requests in zip(protocols, trial.halves, strict=True):
        with trial.proxy(protocol) as proxy:
            trial.collect(trial.send(proxy.url, requests))
    handed = [params for [params] in trial.send_legs(trial.requests, trial.salt(1))]
    time.sleep(2 * NIXL_LEASE_S)
    for other in (2, 3):  # their KV takes the freed blocks
        trial.send_legs(trial.requests, trial.salt(other))
    trial.collect(
        [
            trial.send_decode(request, trial.salt(1), params)
            for request, params in zip(trial.requests, handed, strict=True)
        ]
    )


def _producer_slow(trial: PdTrial) -> None:
    with trial.proxy() as proxy, trial.pair.slowed("prefill"):
        trial.collect(trial.send(proxy.url, trial.requests))


def _producer_stopped(trial: PdTrial) -> None:
    with trial.proxy() as proxy:
        sent = trial.send(proxy.url, trial.requests)
        trial.await_prefill()
        with trial.pair.paused("prefill"):
            trial.collect(sent)


def _producer_killed(trial: PdTrial) -> None:
    with trial.proxy() as proxy:
        sent = trial.send(proxy.url, trial.requests)
        trial.await_prefill()
        trial.pair.kill("prefill")
        trial.collect(sent)


def _producer_restarted(trial: PdTrial) -> None:
    first, second = trial.halves
    with trial.proxy() as proxy:
        sent = trial.send(proxy.url, first)
        trial.await_prefill()
        trial.pair.kill("prefill")
        trial.collect(sent)
        trial.pair.start_missing()
        trial.await_usable(proxy, "prefill")
        trial.collect(trial.send(proxy.url, second))


def _decoder_killed(trial: PdTrial) -> None:
    with trial.proxy() as proxy:
        sent = trial.send(proxy.url, trial.requests)
        trial.await_prefilled(proxy, 1)
        trial.pair.kill("decode")
        trial.collect(sent, may_fail=True)


def _decoder_restarted(trial: PdTrial) -> None:
    first, second = trial.halves
    with trial.proxy() as proxy:
        sent = trial.send(proxy.url, first)
        trial.await_prefill()
        trial.pair.kill("decode")
        trial.collect(sent, may_fail=True)
        trial.pair.start_missing()
        trial.await_usable(proxy, "decode")
        trial.collect(trial.send(proxy.url, second))


def _node_killed(trial: PdTrial) -> None:
    with trial.proxy() as proxy:
        sent = trial.send(proxy.url, trial.requests)
        trial.await_prefill()
        trial.pair.kill_node()
        trial.collect(sent)
    trial.pair.await_node()


def _peer_killed(trial: PdTrial) -> None:
    with trial.proxy() as proxy:
        sent = trial.send(proxy.url, trial.requests)
        trial.await_prefilled(proxy, 1)
        trial.pair.kill_node()
        trial.collect(sent)
    trial.pair.await_node()


def _proxy_killed(trial: PdTrial) -> None:
    with trial.proxy() as proxy:
        with trial.pair.paused("decode"):
            lost = trial.send(proxy.url, trial.requests[:AT_ONCE])
            trial.await_prefilled(proxy, len(lost))
            proxy.kill()
            wait(lost)
        proxy.start()
        trial.collect(trial.send(proxy.url, trial.requests))


def _client_gone(trial: PdTrial) -> None:
    first, second = trial.halves
    with trial.proxy() as proxy:
        with trial.pair.paused("decode"):
            left = [
                post(proxy.url, request.body(trial.salt()), timeout_s=_LEAVE_S)
                for request in first[:AT_ONCE]
            ]
            trial.await_prefilled(proxy, len(left))
            for connection in left:
                connection.close()
        trial.send_legs(second, trial.salt())
        trial.collect(trial.send(proxy.url, trial.requests))


def _duplicate_legs(trial: PdTrial) -> None:
    requests, _ = trial.halves
    handed = trial.send_legs(requests, trial.salt(), times=2)
    trial.collect(
        [
            trial.send_decode(request, trial.salt(), params)
            for request, both in zip(requests, handed, strict=True)
            for params in both
        ]
    )


def _stale_legs(trial: PdTrial) -> None:
    handed = [params for [params] in trial.send_legs(trial.requests, trial.salt())]
    for part, params in enumerate((handed, handed, handed[1:] + handed[:1])):
        trial.collect(
            [
                trial.send_decode(request, trial.salt(part), stale)
                for request, stale in zip(trial.requests, params, strict=True)
            ]
        )


def _same_id(trial: PdTrial) -> None:
    params = {
        "remote_prefiller": {
            "kv_request_id": _SAME_ID,
            "remote_host": "127.0.0.1",
            "remote_port": 9,
        }
    }
    others = trial.requests[1:] + trial.requests[:1]
    for request, other in zip(trial.requests, others, strict=True):
        leg = trial.send_peer_leg(other, trial.salt())
        sent = [trial.send_decode(request, trial.salt(), params, _SAME_ID)]
        sent += [trial.send_decode(other, trial.salt(), params)]
        leg.result()
        trial.collect(sent)


TRIALS: dict[str, Callable[[PdTrial], None]] = {
    "none": _plain,
    "proxy killed": _proxy_killed,
    "client gone": _client_gone,
    "duplicate legs": _duplicate_legs,
    "stale legs": _stale_legs,
    "same id": _same_id,
    "node killed": _node_killed,
    "producer slow": _producer_slow,
    "producer stopped": _producer_stopped,
    "producer restarted": _producer_restarted,
    "producer killed": _producer_killed,
    "decoder restarted": _decoder_restarted,
    "decoder killed": _decoder_killed,
    "producer evicting": _plain,
    "short leases": _short_leases,
    "two nodes": _plain,
    "peer killed": _peer_killed,
}
