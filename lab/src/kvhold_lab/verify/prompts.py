"""Prompts at every boundary of blocks and chunks, with shared prefixes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_lab.verify.messages import Question

_BATCH = 4
_CROWD = 6


@dataclass(frozen=True)
class PromptSizes:
    block: int
    chunk: int
    limit: int


def make_batches(
    vocabulary: Sequence[int],
    sizes: PromptSizes,
    *,
    seed: int,
    num_adapters: int = 0,
    images: bool = False,
) -> list[list[Question]]:
    """Requests without an adapter have their own batches: vLLM's CPU build applies a mixed batch's
    adapter to all.
    """
    rng = random.Random(seed)
    lengths = _lengths(sizes)
    shared = [rng.choice(vocabulary) for _ in range(lengths[-1])]
    prompts = []
    for number, length in enumerate(lengths):
        prefix = (
            shared[
                : rng.choice(
                    [length, length - 1, min(length, sizes.chunk), min(length, sizes.block)]
                )
            ]
            if number % 3
            else []
        )
        prompts.append(prefix + [rng.choice(vocabulary) for _ in range(length - len(prefix))])
    rng.shuffle(prompts)
    prompts += [prompts[-1], max(prompts, key=len)]
    questions = [Question(tokens=prompt) for prompt in prompts]
    if images:
        questions += _with_images(shared[: sizes.block + 3], shared[: 2 * sizes.chunk])
    adapted = [
        Question(tokens=prompt, adapter=adapter)
        for prompt in prompts
        for adapter in range(num_adapters)
    ]
    return [*_batches(questions), *_batches(adapted)]


def make_crowd(
    vocabulary: Sequence[int], sizes: PromptSizes, *, seed: int, num_adapters: int = 0
) -> list[list[Question]]:
    rng = random.Random(seed)
    length = crowd_tokens(sizes)
    shared = [rng.choice(vocabulary) for _ in range(sizes.block)]
    crowd = []
    for number in range(_CROWD):
        prefix = shared if number % 2 else []
        tokens = prefix + [rng.choice(vocabulary) for _ in range(length - len(prefix))]
        crowd.append(
            Question(tokens=tokens, adapter=number % num_adapters if num_adapters else None)
        )
    return [crowd]


def crowd_tokens(sizes: PromptSizes) -> int:
    return -(-(sizes.chunk + sizes.block) // sizes.block) * sizes.block - 2


def _batches(questions: list[Question]) -> list[list[Question]]:
    return [questions[at : at + _BATCH] for at in range(0, len(questions), _BATCH)]


def _lengths(sizes: PromptSizes) -> list[int]:
    block, chunk = sizes.block, sizes.chunk
    edges = {
        1,
        2,
        block - 1,
        block,
        block + 1,
        chunk - 1,
        chunk,
        chunk + 1,
        2 * chunk,
        2 * chunk + 1,
        3 * chunk + block + block // 2 + 3,
    }
    return sorted(length for length in edges if 0 < length <= sizes.limit) or [sizes.limit]


def _with_images(short: list[int], long: list[int]) -> list[Question]:
    return [
        Question(tokens=long, images=[1]),
        Question(tokens=long, images=[2]),
        Question(tokens=short, images=[1]),
        Question(tokens=long, images=[1]),
        Question(tokens=long, images=[1, 2]),
        Question(tokens=long, images=[2, 1]),
    ]
