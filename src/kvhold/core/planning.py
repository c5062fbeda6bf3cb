"""A request's time to first token, for each possible end of the load. No I/O, no state.

An unknown cost counts as 0, so that it is tried and measured.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvhold.core.config import MOST_HANDOVER_S

_ALIKE = 1.01  # within 1 %, the longer load wins: it leaves the engine free

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Cost = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

MOST_NAME = 200
MOST_SPANS = 256
_MOST_PLACES = 16
MOST_NOTE = 1000

_Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
_Wait = Annotated[float, msgspec.Meta(ge=0, le=MOST_HANDOVER_S)]


class ComputeCost(msgspec.Struct, frozen=True, array_like=True):
    """A request and its engine's costs in seconds; 0 is unknown.

    computed_tokens: tokens whose KV the engine has
    step_tokens:     the most tokens per step
    pair_s:          for the attention of one token to one earlier token
    """

    request: _Name
    num_tokens: _Count
    computed_tokens: _Count = 0
    step_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1 << 40
    step_s: _Cost = 0.0
    token_s: _Cost = 0.0
    pair_s: _Cost = 0.0
    load_s: _Cost = 0.0
    load_byte_s: _Cost = 0.0

    @property
    def is_known(self) -> bool:
        return self.step_s + self.token_s + self.pair_s > 0


class HandoverWait(msgspec.Struct, frozen=True, array_like=True):
    """For chunks of a prefill engine.

    grace_s:   the longest wait until the other engine announces them
    """

    timeout_s: _Wait
    grace_s: _Wait = 0.0


class ComputeIntent(msgspec.Struct, frozen=True, array_like=True):
    """For missing chunks.

    waits:     it may wait for another engine, if this is faster
    announces: it computes and stores them now; others may wait
    handover:  another engine computes them for it
    keep_s:    memory keeps the prompt until another engine has read it, or so long after the last
               store; 0: it is not handed over
    announces_tail: also the longest tail
    """

    cost: ComputeCost
    waits: bool = True
    announces: bool = True
    handover: HandoverWait | None = None
    keep_s: _Wait = 0.0
    announces_tail: bool = False


class RequestInfo(msgspec.Struct, frozen=True, array_like=True):
    """As in `ComputeCost`. Empty or 0: unknown"""

    request: _Name = ""
    session: _Name = ""
    num_tokens: _Count = 0
    computed_tokens: _Count = 0


@dataclass(frozen=True)
class LoadOptions:
    """tokens: [n] present at that point
    nbytes: [n] to copy
    wait_s: [n] until they arrive
    """

    tokens: Ints
    nbytes: Ints
    wait_s: Floats


class Alternative(msgspec.Struct, frozen=True):
    num_tokens: int
    wait_s: float
    load_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.load_s + self.compute_s


class LoadedChunks(msgspec.Struct, frozen=True):
    """chunks: runs of one peer's chunks, [first, last]; the last run may be incomplete
    seconds: from the first request to the last answer
    """

    place: str
    chunks: list[list[int]]
    seconds: float


class SpanReport(msgspec.Struct, frozen=True):
    """A span of a request, from token `start` to before `end`.

    sources:  tokens found, by place
    loaded:   from peers
    missing:  why not all were found; empty: all were
    is_alone: it was computed alone, as a prompt of its own
    """

    start: _Count
    end: _Count
    sources: Annotated[dict[str, int], msgspec.Meta(max_length=_MOST_PLACES)] = {}
    loaded: Annotated[list[LoadedChunks], msgspec.Meta(max_length=_MOST_PLACES)] = []
    missing: Annotated[str, msgspec.Meta(max_length=MOST_NOTE)] = ""
    is_alone: bool = False


class BlendReport(msgspec.Struct, frozen=True):
    """A request with spans. Its tokens have exact, reused (approximate) or recomputed KV.

    result: a canary is computed in full
    note:   why it was refused; a canary's drift
    """

    request: Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
    result: Literal["blended", "canary", "refused"]
    num_tokens: _Count
    exact_tokens: _Count = 0
    reused_tokens: _Count = 0
    recomputed_tokens: _Count = 0
    selector: Annotated[str, msgspec.Meta(max_length=MOST_NAME)] = ""
    note: Annotated[str, msgspec.Meta(max_length=MOST_NOTE)] = ""
    spans: Annotated[list[SpanReport], msgspec.Meta(max_length=MOST_SPANS)] = []


class Decision(msgspec.Struct, frozen=True):
    """alternatives: empty: not planned
    missing: why the hit ends, in words; empty: it does not, or still waits
    load_s, compute_s: measured; None: none, or unknown
    reason: empty: not known yet
    """

    request: str
    at_s: float
    num_tokens: int
    computed_tokens: int
    found: dict[str, int]
    alternatives: dict[str, Alternative]
    chosen_tokens: int
    why: str
    waited_s: float = 0.0
    hit_tokens: int | None = None
    load_s: float | None = None
    compute_s: float | None = None
    missing: str = ""
    loaded: list[LoadedChunks] = []
    blend: BlendReport | None = None
    client: str = ""
    tenant: str = ""
    session: str = ""
    namespace: str = ""
    reason: str = ""


def compute_s(cost: ComputeCost, tokens: Ints) -> Floats:
    """[n] seconds to compute all after the first `tokens` tokens: at least the last token."""
    num_left = np.maximum(cost.num_tokens - np.maximum(tokens, cost.computed_tokens), 1)
    pairs = num_left * (cost.num_tokens - num_left / 2)
    seconds: Floats = (
        -(-num_left // cost.step_tokens) * cost.step_s
        + num_left * cost.token_s
        + pairs * cost.pair_s
    )
    return seconds


def prefill_s(cost: ComputeCost, first: int, last: int) -> float:
    num = max(0, last - first)
    steps = -(-num // cost.step_tokens)
    return steps * cost.step_s + num * cost.token_s + num * (last - num / 2) * cost.pair_s


def load_s(cost: ComputeCost, tokens: Ints, nbytes: Ints) -> Floats:
    """[n] seconds of the copy into the engine; 0 if it has the tokens."""
    seconds: Floats = np.where(
        tokens > cost.computed_tokens, cost.load_s + nbytes * cost.load_byte_s, 0.0
    )
    return seconds


def total_s(cost: ComputeCost, options: LoadOptions) -> Floats:
    return (
        options.wait_s
        + load_s(cost, options.tokens, options.nbytes)
        + compute_s(cost, options.tokens)
    )


def choose(cost: ComputeCost, options: LoadOptions) -> int:
    """Among equals, or without costs, the option that loads most."""
    if not cost.is_known:
        return len(options.tokens) - 1
    totals = total_s(cost, options)
    return int(np.flatnonzero(~(totals > totals.min() * _ALIKE))[-1])


def alternative(cost: ComputeCost, options: LoadOptions, number: int) -> Alternative:
    at = slice(number, number + 1)
    tokens = options.tokens[at]
    load, compute = load_s(cost, tokens, options.nbytes[at]), compute_s(cost, tokens)
    return Alternative(
        int(tokens[0]), float(options.wait_s[number]), float(load[0]), float(compute[0])
    )
