"""Measure this engine's cost of computing and of loading, from its own steps and loads.

    costs.planned(output)                    # a step was scheduled
    costs.over()                             # the oldest planned step has been computed
    work = costs.work("cmpl-1", 4000, 0)     # the costs that a lookup passes to the cache

A step lasts from its planning, or from the end of the step before it if several are under way. Only
steps that compute part of a prompt are measured. A load lasts from its planning until its request
is in a step. That is later than the end of the copy, and it is the time that a request waits.

`work` is for any thread, the other methods for the scheduler's thread. Their time grows with the
number of requests in steps that compute prompts; in other steps it is constant. No vLLM.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvhold.core.estimates import Estimate
from kvhold.core.planning import Work, compute_s

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_SLOW_TOKEN_S = 0.002  # half a billion parameters on two cores
_MOST_STEPS = 64  # steps under way; if there are more, some were never computed


@dataclass(frozen=True)
class Took:
    """The times of one request: its load, and computing the rest of its prompt; -1: no load."""

    request_id: str
    load_s: float
    compute_s: float


@dataclass
class _Step:
    """A planned step.

    planned_s:  when it was planned
    quantities: (tokens, 1 step, pairs of a token with an earlier token); None if the step computes
        no part of a prompt. Tokens come first: while only one step is known, the fit assigns its
        time to them, so that long prompts are loaded rather than computed
    done:       requests whose prompts are computed after it
    """

    planned_s: float
    quantities: tuple[float, float, float] | None
    done: list[str] = field(default_factory=list)


@dataclass
class _Request:
    """A request whose times are reported to the cache.

    began_s:      when it ran first; 0: not yet
    load_began_s: when its load was planned; 0: not yet
    """

    num_tokens: int
    began_s: float = 0.0
    load_began_s: float = 0.0
    load_bytes: int = 0
    load_s: float = -1.0


class Costs:
    """The measured costs of one engine."""

    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """step_tokens: the most tokens that a step computes. clock: in seconds."""
        self._step_tokens = step_tokens
        self._clock = clock
        self._computing = Estimate(3)
        self._loading = Estimate(2)
        self._steps: deque[_Step] = deque()
        self._requests: dict[str, _Request] = {}
        self._last_over_s = 0.0

    def work(self, request: str, num_tokens: int, computed_tokens: int) -> Work:
        """Return a request with its costs, as far as they are measured."""
        token_s, step_s, pair_s = self._computing.costs or (0.0, 0.0, 0.0)
        load_s, load_byte_s = self._loading.costs or (0.0, 0.0)
        return Work(
            request,
            num_tokens,
            computed_tokens,
            self._step_tokens,
            step_s,
            token_s,
            pair_s,
            load_s,
            load_byte_s,
        )

    def compute_s(self, num_tokens: int, computed_tokens: int) -> float:
        """Return the seconds that this engine takes to compute the rest of a prompt. Any thread.

        Before the first measurement, the answer is that of a slow engine.
        """
        work = self.work("", num_tokens, computed_tokens)
        if not work.is_known:
            return (num_tokens - computed_tokens) * _SLOW_TOKEN_S
        return float(compute_s(work, np.array([computed_tokens]))[0])

    def prepare(self) -> None:
        """Fit the measurements (1 to 2 ms), before a lookup has to wait for the fit. Any thread."""
        for estimate in (self._computing, self._loading):
            estimate.costs  # noqa: B018 - reading it fits it

    def follow(self, request_id: str, num_tokens: int) -> None:
        """Have `over` report this request, which has `num_tokens` tokens to compute."""
        self._requests[request_id] = _Request(num_tokens)

    def load_begins(self, request_id: str, nbytes: int) -> None:
        """Record that a request's load of `nbytes` bytes is planned."""
        if request_id in self._requests:
            self._requests[request_id].load_began_s, self._requests[request_id].load_bytes = (
                self._clock(),
                nbytes,
            )

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, unless a step under way still reports it.

        vLLM reports the end of a one-token answer before that step is over.
        """
        if not any(request_id in step.done for step in self._steps):
            self._requests.pop(request_id, None)

    def planned(self, output: "SchedulerOutput") -> None:
        """Record that a step was scheduled. `over` records that it has been computed."""
        now_s = self._clock()
        if len(self._steps) >= _MOST_STEPS:
            for lost in self._steps:
                for request_id in lost.done:
                    self._requests.pop(request_id, None)
            self._steps.clear()
        step = _Step(now_s, None)
        self._steps.append(step)
        drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        if not output.scheduled_new_reqs and output.total_num_scheduled_tokens - drafts == len(
            output.num_scheduled_tokens
        ):
            return  # only the next token of each request, and its drafts
        tokens, pairs = 0, 0.0
        for request_id, computed in _computed(output):
            count = output.num_scheduled_tokens[request_id]
            tokens += count
            pairs += count * (computed + count / 2)
            if (request := self._requests.get(request_id)) is not None:
                self._runs(request, now_s)
                if computed + count >= request.num_tokens:
                    step.done.append(request_id)
        step.quantities = (float(tokens), 1.0, pairs)

    def over(self) -> list[Took]:
        """Record the end of the oldest step. Return the requests that got their first token."""
        if not self._steps:
            return []
        step, now_s = self._steps.popleft(), self._clock()
        if step.quantities is not None:
            self._computing.measured(
                step.quantities, now_s - max(step.planned_s, self._last_over_s)
            )
        self._last_over_s = now_s
        done = [(request_id, self._requests.pop(request_id, None)) for request_id in step.done]
        return [
            Took(request_id, request.load_s, now_s - request.began_s)
            for request_id, request in done
            if request is not None
        ]

    def _runs(self, request: _Request, now_s: float) -> None:
        if request.began_s:
            return
        request.began_s = now_s
        if request.load_began_s:
            request.load_s = now_s - request.load_began_s
            self._loading.measured((1.0, float(request.load_bytes)), request.load_s)


def _computed(output: "SchedulerOutput") -> Iterator[tuple[str, int]]:
    """Yield each scheduled request with its tokens that were computed before the step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    yield from zip(
        output.scheduled_cached_reqs.req_ids,
        output.scheduled_cached_reqs.num_computed_tokens,
        strict=True,
    )
