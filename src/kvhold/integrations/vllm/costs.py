"""This engine's costs of computing and loading.

Only steps that compute part of a prompt count. A load lasts from its planning until its request is
in a step. Any thread: `cost`, `compute_s`, `prepare`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvhold.core.estimates import Estimate
from kvhold.core.planning import ComputeCost, compute_s

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_SLOW_TOKEN_S = 0.002  # half a billion parameters on two cores
_MOST_STEPS = 64  # with more planned steps, vLLM never ran some of them


@dataclass(frozen=True)
class Took:
    request_id: str
    load_s: float | None
    compute_s: float


@dataclass
class _Step:
    """quantities: (tokens, 1 step, pairs of a token with an earlier token); None: computes no
    prompt. After one measurement, the first cost gets all the time
    """

    planned_s: float
    quantities: tuple[float, float, float] | None
    done: list[str] = field(default_factory=list)


@dataclass
class _Request:
    num_tokens: int
    began_s: float = 0.0
    load_began_s: float = 0.0
    load_bytes: int = 0
    load_s: float | None = None


class Costs:
    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_tokens = step_tokens
        self._clock = clock
        self._computing = Estimate(3)
        self._loading = Estimate(2)
        self._steps: deque[_Step] = deque()
        self._requests: dict[str, _Request] = {}
        self._last_over_s = 0.0

    def cost(self, request: str, num_tokens: int, computed_tokens: int) -> ComputeCost:
        token_s, step_s, pair_s = self._computing.costs or (0.0, 0.0, 0.0)
        load_s, load_byte_s = self._loading.costs or (0.0, 0.0)
        return ComputeCost(
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
        """Assume a slow engine before a measurement."""
        cost = self.cost("", num_tokens, computed_tokens)
        if not cost.is_known:
            return (num_tokens - computed_tokens) * _SLOW_TOKEN_S
        return float(compute_s(cost, np.array([computed_tokens]))[0])

    def prepare(self) -> None:
        """Fit the measurements (1 to 2 ms) before a lookup."""
        for estimate in (self._computing, self._loading):
            estimate.costs  # noqa: B018 - reading it fits it

    def follow(self, request_id: str, num_tokens: int) -> None:
        self._requests[request_id] = _Request(num_tokens)

    def load_begins(self, request_id: str, nbytes: int) -> None:
        if request_id in self._requests:
            self._requests[request_id].load_began_s, self._requests[request_id].load_bytes = (
                self._clock(),
                nbytes,
            )

    def forget(self, request_id: str) -> None:
        """Keep a request that a step will report."""
        if not any(request_id in step.done for step in self._steps):
            self._requests.pop(request_id, None)

    def planned(self, output: "SchedulerOutput") -> None:
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
            return
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
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    yield from zip(
        output.scheduled_cached_reqs.req_ids,
        output.scheduled_cached_reqs.num_computed_tokens,
        strict=True,
    )
