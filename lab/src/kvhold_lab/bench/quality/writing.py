from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.quality.tasks import LOOKUP, NO_KIND, Exams

QUESTIONS = 8
CONTINUED_TOKENS = 64

_FIRST, _SECOND = "bdfgklmnprstvz", "aeiou"


def written_recall(
    tokenizer: Any, *, num_contexts: int, num_tokens: int, seed: int
) -> Iterator[Exams]:
    rng = np.random.default_rng(seed)
    names = [
        f"{a}{b}{c}{d}".capitalize()
        for a in _FIRST
        for b in _SECOND
        for c in _FIRST
        for d in _SECOND
    ]
    line_tokens = len(tokenizer.encode("\nThe number of Bato is 4821.", add_special_tokens=False))
    count = max(QUESTIONS, num_tokens // line_tokens)
    for _ in range(num_contexts):
        chosen = [names[at] for at in rng.permutation(len(names))[:count]]
        numbers = rng.integers(1000, 10_000, count).tolist()
        lines = [
            f"The number of {name} is {number}."
            for name, number in zip(chosen, numbers, strict=True)
        ]
        questions: list[int] = []
        kinds: list[int] = []
        for at in rng.permutation(count)[:QUESTIONS].tolist():
            asked = tokenizer.encode(f"\nThe number of {chosen[at]} is", add_special_tokens=False)
            answer = tokenizer.encode(f" {numbers[at]}", add_special_tokens=False)
            end = tokenizer.encode(".", add_special_tokens=False)
            questions += asked + answer + end
            kinds += [NO_KIND] * len(asked) + [LOOKUP] * len(answer) + [NO_KIND] * len(end)
        yield _exam(tokenizer.encode("\n".join(lines)), questions, kinds)


def continued(tokens: Sequence[int], *, num_contexts: int, num_tokens: int) -> Iterator[Exams]:
    step = num_tokens + CONTINUED_TOKENS
    most = len(tokens) // step
    if most < 1:
        raise ConfigError(f"a text of {len(tokens)} tokens; at least {step} are needed")
    for at in np.linspace(0, most - 1, min(most, num_contexts)).round().astype(int).tolist():
        piece = tokens[at * step : (at + 1) * step]
        yield _exam(
            piece[:num_tokens], piece[num_tokens:], [NO_KIND] + [LOOKUP] * (CONTINUED_TOKENS - 1)
        )


def _exam(context: Sequence[int], questions: Sequence[int], kinds: Sequence[int]) -> Exams:
    contexts, asked, marks = (np.array([part], np.int64) for part in (context, questions, kinds))
    return Exams(contexts, asked, marks)
