"""Questions whose answers stand in the context and nowhere else: one wrong key or value in the KV,
and the answer is another one.

    exams = draw(np.random.default_rng(0), num_exams=16, num_tokens=384, asked=Asked(lookups=6,
    hops=2, runs=1))

A context is pairs `key value` and a few runs `RUN key letter ...`, in any order, each key once.
Some pairs have a key for their value, the first half of two hops, asked for or not. Three kinds of
questions follow it:

    LOOKUP key -> the token after that key, among as many others as the context has room for
    HOP    key -> the value of the key that is this key's value
    RUN    key -> all letters of that run, one after the other; letters come again elsewhere, so one
    letter does not say the next

Tokens are numbers, there is no text. Answers stand in the questions (a model is told the right
ones, and asked for the next token before each). `benchmarks/quality/train.py` trains on these,
other numbers of the same generator. Only numpy, no I/O.
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
NO_KIND = 0  # of a token that is not an answer


@dataclass(frozen=True)
class Asked:
    """How many questions of each kind a context is asked.

    It has as many runs, and twice as many two hops.
    """

    lookups: int
    hops: int
    runs: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all questions with their answers."""
        return 3 * self.lookups + 3 * self.hops + (2 + RUN_LETTERS) * self.runs

    @property
    def least_context(self) -> int:
        """The shortest context that has it all."""
        return 1 + 8 * self.hops + (2 + RUN_LETTERS) * self.runs + 2 * self.lookups


@dataclass(frozen=True)
class Exams:
    """Contexts of one length with their questions.

    contexts:  [exams, tokens]
    questions: [exams, asked.num_tokens], the answers in their places
    kinds:     [exams, asked.num_tokens] NO_KIND, or of an answer the question's mark
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
    """Exams with contexts of `num_tokens` tokens, the same for the same generator. num_keys: of how
    many keys (a beginner's are few).

    Raises ValueError if the context is too short for what is asked, or has room for more keys than
    there are.
    """
    longest = longest_context(asked, num_keys)
    if not asked.least_context <= num_tokens <= longest:
        raise ValueError(
            f"a context of {num_tokens} tokens; {asked} wants {asked.least_context} to {longest}"
        )
    drawn = [_draw_one(rng, num_tokens, asked, num_keys) for _ in range(num_exams)]
    contexts, questions, kinds = (np.stack(parts) for parts in zip(*drawn, strict=True))
    return Exams(contexts, questions, kinds)


def longest_context(asked: Asked, num_keys: int = NUM_KEYS) -> int:
    """How many tokens of context there are different keys for."""
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
    in_hops = np.arange(4 * asked.hops)  # keys are shuffled, so any are as good
    starts, middles = in_hops.reshape(2, -1)
    values[starts] = pair_keys[middles]
    asked_starts, asked_middles = starts[: asked.hops], middles[: asked.hops]

    records = [np.array(pair) for pair in zip(pair_keys, values, strict=True)]
    records += [np.array([RUN, key, *run]) for key, run in zip(run_keys, letters, strict=True)]
    order = rng.permutation(len(records))
    context = np.concatenate([np.full(1 + spare, BEGIN), *(records[at] for at in order)])

    free = np.setdiff1d(
        np.arange(num_pairs), [asked_starts, asked_middles]
    )  # no question says what another asks
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
