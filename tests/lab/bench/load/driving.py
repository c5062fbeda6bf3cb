"""Workloads without a server: every session to its end, each request answered at once."""

from collections.abc import Callable
from itertools import chain
from typing import cast

from kvhold_lab.bench.load.prompts import Content, Prompts
from kvhold_lab.bench.load.work import Phase, Reply, Request, Session, Workload


def well(request: Request) -> Reply:
    """An answer that says how many turns its prompt had."""
    first = request.turns[0].content
    content: Content = (
        f" answer {len(request.turns)}" if isinstance(first, str) else [7_000 + len(request.turns)]
    )
    return Reply(latency_s=1.0, ttft_s=0.5, output_tokens=request.max_tokens, content=content)


def phases(
    workload: Workload, prompts: Prompts, answer: Callable[[Request], Reply] = well
) -> dict[str, list[list[Request]]]:
    """Requests of each session of each phase."""
    return {phase.name: _sessions(phase, answer) for phase in workload.phases(prompts)}


def requests(
    workload: Workload, prompts: Prompts, answer: Callable[[Request], Reply] = well
) -> list[Request]:
    """All requests, session by session."""
    return [
        request
        for sessions in phases(workload, prompts, answer).values()
        for request in chain.from_iterable(sessions)
    ]


def prompt(request: Request) -> list[int]:
    """Its token ids."""
    contents = [request.turns[place].content for place in range(len(request.turns))]
    return list(chain.from_iterable(cast(list[list[int]], contents)))


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens two prompts have in common at their beginnings."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _sessions(phase: Phase, answer: Callable[[Request], Reply]) -> list[list[Request]]:
    return [_session(session, answer) for session in phase.sessions]


def _session(session: Session, answer: Callable[[Request], Reply]) -> list[Request]:
    asked = []
    try:
        request = next(session)
        while True:
            asked.append(request)
            request = session.send(answer(request))
    except StopIteration:
        return asked
