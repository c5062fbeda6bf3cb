"""Load, compute, or load a part: predict a request's time to first token for each possible end of
the load.

    work = Work("cmpl-1", num_tokens=4000, computed_tokens=0, step_tokens=2048, token_s=4e-4, ...)
    options = Options(tokens=np.array([0, 512, 4000]), nbytes=..., wait_s=...)
    options.tokens[choose(work, options)]

The time is the sum of the wait for lower tiers, the copy into the engine, and the compute time of
the rest. An unknown cost counts as 0, so that it is tried and then measured. Pure.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

_ALIKE = 1.01  # within 1 % of the best: load more, to leave the engine to other requests

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Cost = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

MOST_NAME = 200


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A request and its engine's measured costs. A cost of 0 was not measured yet.

    request:         its name, for people
    num_tokens:      of the prompt
    computed_tokens: tokens of the prompt whose KV the engine already has
    step_tokens:     the most tokens that the engine computes in one step
    step_s:          seconds per step
    token_s:         seconds per token
    pair_s:          seconds for the attention of one token to one earlier token
    load_s:          seconds per load
    load_byte_s:     seconds per loaded byte
    """

    request: Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
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
        """Whether any compute cost was measured."""
        return self.step_s + self.token_s + self.pair_s > 0


@dataclass(frozen=True)
class Options:
    """The points of a prompt at which a load may end, in the prompt's order.

    tokens: [n] tokens that are present when the load ends there
    nbytes: [n] bytes to copy
    wait_s: [n] seconds until they have arrived
    """

    tokens: Ints
    nbytes: Ints
    wait_s: Floats


class Alternative(msgspec.Struct, frozen=True):
    """The predicted seconds of one option.

    It loads the hit within the first `num_tokens` tokens, and computes the rest.
    """

    num_tokens: int
    wait_s: float
    load_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """Seconds until the first token."""
        return self.wait_s + self.load_s + self.compute_s


class Decision(msgspec.Struct, frozen=True):
    """The decision for one request, its reason, and its measured result.

    at_s:            when, in seconds of the wall clock
    num_tokens:      of the prompt
    computed_tokens: tokens of the prompt that the engine already had
    found:           tokens by the place of their KV, as far as the lookup searched; the rest was
                     not found
    alternatives:    predictions by name: `compute`, `memory`, `all`, and the `chosen` one
    chosen_tokens:   the planned length of the hit
    why:             the reason, in a sentence
    waited_s:        how long the request waited
    hit_tokens:      the length of the hit after the wait; -1: it still waits
    load_s:          how long the load took; -1: not known (yet), or there was none
    compute_s:       how long computing the rest took; -1: as for load_s
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
    hit_tokens: int = -1
    load_s: float = -1.0
    compute_s: float = -1.0


def compute_s(work: Work, tokens: Ints) -> Floats:
    """Return the seconds to compute the rest of the prompt after the first `tokens` tokens: [n].

    Tokens that the engine has are not computed. At least the last token is computed, because its
    output was requested.
    """
    num_left = np.maximum(work.num_tokens - np.maximum(tokens, work.computed_tokens), 1)
    pairs = num_left * (work.num_tokens - num_left / 2)
    seconds: Floats = (
        -(-num_left // work.step_tokens) * work.step_s
        + num_left * work.token_s
        + pairs * work.pair_s
    )
    return seconds


def load_s(work: Work, tokens: Ints, nbytes: Ints) -> Floats:
    """Return the seconds to copy the tokens into the engine: [n]; 0 if it has them already."""
    seconds: Floats = np.where(
        tokens > work.computed_tokens, work.load_s + nbytes * work.load_byte_s, 0.0
    )
    return seconds


def total_s(work: Work, options: Options) -> Floats:
    """Return the seconds until the first token: [n]."""
    return (
        options.wait_s
        + load_s(work, options.tokens, options.nbytes)
        + compute_s(work, options.tokens)
    )


def choose(work: Work, options: Options) -> int:
    """Return the number of the best option; of equally good ones, the one that loads most.

    Returns the last option while no compute cost is known.
    """
    if not work.is_known:
        return len(options.tokens) - 1
    totals = total_s(work, options)
    return int(np.flatnonzero(~(totals > totals.min() * _ALIKE))[-1])  # NaN counts as good


def alternative(work: Work, options: Options, number: int) -> Alternative:
    """Return the prediction for option `number`, for people."""
    at = slice(number, number + 1)
    tokens = options.tokens[at]
    load, compute = load_s(work, tokens, options.nbytes[at]), compute_s(work, tokens)
    return Alternative(
        int(tokens[0]), float(options.wait_s[number]), float(load[0]), float(compute[0])
    )
