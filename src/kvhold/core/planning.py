"""Load, compute, or load a part: what a request's time to first token would be, for each place where a load may end.

    work = Work("cmpl-1", num_tokens=4000, computed_tokens=0, step_tokens=2048, token_s=4e-4, ...)
    options = Options(tokens=np.array([0, 512, 4000]), nbytes=..., wait_s=...)
    options.tokens[choose(work, options)]

The time is that of waiting for what comes from lower tiers, of copying it into the engine, and of computing the rest. What is not known
costs nothing, so that it is tried, and known afterwards. Pure.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

_ALIKE = 1.01  # what takes no longer than this times the best is as good; then more is loaded: it leaves the engine to others

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Cost = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

MOST_NAME = 200


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A request, and what it costs its engine, as the engine has measured it. A cost of 0 was not measured yet.

    request:         its name, for people
    num_tokens:      of the prompt; computed_tokens: of them, those whose KV the engine has
    step_tokens:     the most that the engine computes in one step
    step_s, token_s, pair_s: of a step, of a token, of a token's looking at one before it
    load_s, load_byte_s:     of a load, and of each byte of it
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
        """Whether there is something to go by."""
        return self.step_s + self.token_s + self.pair_s > 0


@dataclass(frozen=True)
class Options:
    """Places where a load may end, the prompt's beginning first.

    tokens: [n] tokens that are there then; nbytes: [n] bytes to be copied; wait_s: [n] seconds until they have come
    """

    tokens: Ints
    nbytes: Ints
    wait_s: Floats


class Alternative(msgspec.Struct, frozen=True):
    """One of them in seconds: what is found of `num_tokens` tokens is loaded, and the rest computed."""

    num_tokens: int
    wait_s: float
    load_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """Until the first token."""
        return self.wait_s + self.load_s + self.compute_s


class Decision(msgspec.Struct, frozen=True):
    """What was decided for one request, why, and what came of it.

    at_s:                        when, in seconds of the world's clock
    num_tokens, computed_tokens: of the prompt; of them, what the engine had already
    found:                       tokens by where their KV was, as far as anybody looked; what is left was nowhere
    alternatives:                what was predicted, by name: `compute`, `memory`, `all`, and the `chosen`
    chosen_tokens:               how many were to be there
    why:                         in a sentence
    waited_s, hit_tokens:        how long it waited, and how many were there then; -1: it waits
    load_s, compute_s:           how long the load and computing the rest took; -1: not known (yet), or there was none
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
    """[n] seconds to compute what is left where the first `tokens` of the prompt are there, or those that the engine has. At least the last
    token is computed: its output is what was asked for."""
    num_left = np.maximum(work.num_tokens - np.maximum(tokens, work.computed_tokens), 1)
    pairs = num_left * (work.num_tokens - num_left / 2)
    seconds: Floats = -(-num_left // work.step_tokens) * work.step_s + num_left * work.token_s + pairs * work.pair_s
    return seconds


def load_s(work: Work, tokens: Ints, nbytes: Ints) -> Floats:
    """[n] seconds to copy them into the engine; what it has already needs no load."""
    seconds: Floats = np.where(tokens > work.computed_tokens, work.load_s + nbytes * work.load_byte_s, 0.0)
    return seconds


def total_s(work: Work, options: Options) -> Floats:
    """[n] seconds until the first token."""
    return options.wait_s + load_s(work, options.tokens, options.nbytes) + compute_s(work, options.tokens)


def choose(work: Work, options: Options) -> int:
    """The number of the best option; of those that are as good, the one that loads most. All where the engine knows nothing yet."""
    if not work.is_known:
        return len(options.tokens) - 1
    totals = total_s(work, options)
    return int(np.flatnonzero(~(totals > totals.min() * _ALIKE))[-1])  # what is no number is not worse: then all


def alternative(work: Work, options: Options, number: int) -> Alternative:
    """One option, for people."""
    at = slice(number, number + 1)
    tokens = options.tokens[at]
    load, compute = load_s(work, tokens, options.nbytes[at]), compute_s(work, tokens)
    return Alternative(int(tokens[0]), float(options.wait_s[number]), float(load[0]), float(compute[0]))
