"""Questions whose answers are only in the context.

A context has pairs `key value` and runs `RUN key letter ...`. Questions:

    LOOKUP key -> the token after that key
    HOP    key -> the value of the key that is this key's value
    RUN    key -> all letters of that run
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

BEGIN, LOOKUP, HOP, RUN = range(4)
_FIRST_KEY, NUM_KEYS = 8, 256
_FIRST_VALUE, NUM_VALUES = _FIRST_KEY + NUM_KEYS, 64
_FIRST_LETTER, NUM_LETTERS = _FIRST_VALUE + NUM_VALUES, 56
VOCAB_SIZE = _FIRST_LETTER + NUM_LETTERS

RUN_LETTERS = 8
KINDS = {"lookup": LOOKUP, "hop": HOP, "run": RUN}
NO_KIND = 0


@dataclass(frozen=True)
class Asked:
    lookups: int
    hops: int
    runs: int

    @property
    def num_tokens(self) -> int:
        return 3 * self.lookups + 3 * self.hops + (2 + RUN_LETTERS) * self.runs

    @property
    def least_context(self) -> int:
        return 1 + 8 * self.hops + (2 + RUN_LETTERS) * self.runs + 2 * self.lookups


@dataclass(frozen=True)
class Exams:
    """contexts:  [exams, tokens]
    questions: [exams, asked.num_tokens], with answers
    kinds:     [exams, asked.num_tokens], the mark of an answer's question, else NO_KIND
    """

    contexts: Tokens
    questions: Tokens
    kinds: Tokens


def draw(
    rng: np.random.Generator,
    *,
    num_exams: int,
    num_tokens: int,
    asked: Asked,
    num_keys: int = NUM_KEYS,
) -> Exams:
    """Raises ValueError: contexts are too short."""
    longest = longest_context(asked, num_keys)
    if not asked.least_context <= num_tokens <= longest:
        raise ValueError(
            f"a context of {num_tokens} tokens; {asked} wants {asked.least_context} to {longest}"
        )
    drawn = [_draw_one(rng, num_tokens, asked, num_keys) for _ in range(num_exams)]
    contexts, questions, kinds = (np.stack(parts) for parts in zip(*drawn, strict=True))
    return Exams(contexts, questions, kinds)


def longest_context(asked: Asked, num_keys: int = NUM_KEYS) -> int:
    return 1 + (2 + RUN_LETTERS) * asked.runs + 2 * (num_keys - asked.runs)


def _draw_one(
    rng: np.random.Generator, num_tokens: int, asked: Asked, num_keys: int
) -> tuple[Tokens, Tokens, Tokens]:
    run_tokens = (2 + RUN_LETTERS) * asked.runs
    num_pairs, spare = divmod(num_tokens - 1 - run_tokens, 2)
    keys = _FIRST_KEY + rng.permutation(num_keys)[: num_pairs + asked.runs]
    pair_keys, run_keys = keys[:num_pairs], keys[num_pairs:]
    values = _FIRST_VALUE + rng.integers(0, NUM_VALUES, num_pairs)
    letters = _FIRST_LETTER + rng.integers(0, NUM_LETTERS, (asked.runs, RUN_LETTERS))
    in_hops = np.arange(4 * asked.hops)
    starts, middles = in_hops.reshape(2, -1)
    values[starts] = pair_keys[middles]
    asked_starts, asked_middles = starts[: asked.hops], middles[: asked.hops]

    records = [np.array(pair) for pair in zip(pair_keys, values, strict=True)]
    records += [np.array([RUN, key, *run]) for key, run in zip(run_keys, letters, strict=True)]
    order = rng.permutation(len(records))
    context = np.concatenate([np.full(1 + spare, BEGIN), *(records[at] for at in order)])

    free = np.setdiff1d(np.arange(num_pairs), [asked_starts, asked_middles])
    looked_up = rng.permutation(free)[: asked.lookups]
    asks = [(LOOKUP, pair_keys[at], [values[at]]) for at in looked_up]
    asks += [
        (HOP, pair_keys[at], [values[to]])
        for at, to in zip(asked_starts, asked_middles, strict=True)
    ]
    asks += [(RUN, key, run) for key, run in zip(run_keys, letters, strict=True)]
    asks = [asks[at] for at in rng.permutation(len(asks))]
    questions = np.concatenate([[mark, key, *answers] for mark, key, answers in asks])
    kinds = np.concatenate(
        [[NO_KIND, NO_KIND, *[mark] * len(answers)] for mark, _, answers in asks]
    )
    return context, questions, kinds
