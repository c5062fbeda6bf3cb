from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvhold_lab.engines.stepped import SteppedEngine
from kvhold_lab.verify.messages import STAGES, Serve, VerifyArrival, VerifyServed

_BEST = 2


@dataclass
class _Live:
    """reached: steps since the stage of its abort"""

    arrival: VerifyArrival
    name: str = ""
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    end: str = ""
    aborted_in: str = ""
    reached: int = 0
    num_preemptions: int = 0


def serve(engine: SteppedEngine, operation: Serve) -> VerifyServed:
    requests = [_Live(arrival) for arrival in operation.arrivals]
    coming = deque(sorted(requests, key=lambda live: live.arrival.step))
    running: dict[str, _Live] = {}
    step = 0
    while coming or engine.is_busy():
        if not engine.is_busy():
            step = max(step, coming[0].arrival.step)
        while coming and coming[0].arrival.step <= step:
            live = coming.popleft()
            live.name = _add(engine, live.arrival, margins=operation.margins)
            running[live.name] = live
            if live.arrival.abort == "arrived":
                _abort(engine, running, live, "arrived")
        for output in engine.step():
            _take(running, output)
        step += 1
        for live in list(running.values()):
            _look(engine, running, live)
    engine.drain()
    return VerifyServed(
        token_ids=[live.token_ids for live in requests],
        ends=[live.end for live in requests],
        aborted_in=[live.aborted_in for live in requests],
        margins=[live.margins for live in requests],
        names=[engine.inner_name(live.name) for live in requests],
        num_preemptions=sum(live.num_preemptions for live in requests),
    )


def _add(engine: SteppedEngine, arrival: VerifyArrival, *, margins: bool) -> str:
    prompt: dict[str, Any] = {"prompt_token_ids": arrival.tokens}
    if arrival.salt:
        prompt["cache_salt"] = arrival.salt
    extra = {"kv_transfer_params": {"kvhold": arrival.rules}} if arrival.rules else None
    logprobs = _BEST if margins else None
    return engine.add(
        prompt,
        max_tokens=arrival.max_tokens,
        priority=arrival.priority,
        extra=extra,
        logprobs=logprobs,
    )


def _take(running: dict[str, _Live], output: Any) -> None:
    live = running.get(output.request_id)
    if live is None:
        return
    (answer,) = output.outputs
    live.token_ids = list(answer.token_ids)
    if answer.logprobs is not None:
        live.margins = [_margin(best) for best in answer.logprobs]
    if output.finished:
        live.end = str(answer.finish_reason)
        del running[live.name]


def _margin(best: dict[int, Any]) -> float:
    first, second = sorted((token.logprob for token in best.values()), reverse=True)[:_BEST]
    return float(first - second)


def _look(engine: SteppedEngine, running: dict[str, _Live], live: _Live) -> None:
    request = engine.request(live.name)
    if request is None:
        return
    live.num_preemptions = request.num_preemptions
    stage, wanted = _stage_of(request), live.arrival.abort
    if wanted is not None and STAGES.index(stage) >= STAGES.index(wanted):
        if live.reached >= live.arrival.abort_after:
            _abort(engine, running, live, stage)
        live.reached += 1


def _abort(engine: SteppedEngine, running: dict[str, _Live], live: _Live, stage: str) -> None:
    engine.abort(live.name)
    live.aborted_in, live.end = stage, "abort"
    del running[live.name]


def _stage_of(request: Any) -> str:
    from vllm.v1.request import RequestStatus

    match request.status:
        case RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "loading"
        case RequestStatus.PREEMPTED:
            return "preempted"
        case RequestStatus.RUNNING:
            return (
                "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
            )
    return "waiting"
