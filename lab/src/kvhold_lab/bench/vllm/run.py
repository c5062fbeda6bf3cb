"""The rounds: every system gets the same prompts, and all answers must be equal.

A cell is one request or a burst, put to the systems in random order. Ratios are taken within a
cell. A prompt begins with a text of the previous round. A round computes several times an engine's
small KV memory, so that memory has forgotten the text. Without cells of no reuse, all engines but
the limit forget before each request.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence

from kvhold.core.errors import KVHoldError
from kvhold_lab.bench.engines import System
from kvhold_lab.bench.ratios import Cell
from kvhold_lab.bench.vllm.systems import (
    AGAIN,
    BESIDE,
    KVHOLD,
    LAYERWISE,
    LEFT_AGAIN,
    LEFT_ALONE,
    LIMIT,
    OFFLOADING,
    OUTPUT_TOKENS,
    PLAIN,
    RECOMPUTE,
    UNCHECKED,
)
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.prompts import make_prompt

_FIRST_KNOWN = 1_000_000
REUSE_PERCENT = (0, 25, 50, 75, 100)
BURST = 2
HELD_PROMPTS = 48  # a round makes 32, and 40 with `unchecked`
_UNCHECKED_CELLS = 8


class OutputsDiffer(KVHoldError):
    """Answers differ, so no time is valid."""


def rounds(
    systems: dict[str, System],
    model: ModelInfo,
    *,
    num_tokens: int,
    num_rounds: int,
    say: Callable[[str], None],
    shares: Sequence[int] = REUSE_PERCENT,
) -> Iterator[list[Cell]]:
    """Run all cells. Yields the rounds, without the first.

    shares: of reuse, per cent. Raises OutputsDiffer and EngineFailed.
    """
    chance = random.Random(num_tokens)
    prompts = _Prompts(model, num_tokens)
    for number in range(1 + num_rounds):
        began, cells = time.monotonic(), []
        for reuse in shares:
            of_reuse = _cells(reuse) + (
                [((BESIDE, LAYERWISE), False)] * 2 if LAYERWISE in systems else []
            )
            of_reuse += (
                [((KVHOLD, UNCHECKED), False)] * _UNCHECKED_CELLS
                if UNCHECKED in systems and reuse == 100
                else []
            )
            for at, (names, burst) in enumerate(of_reuse):
                texts = [f"text {at}.{piece}" for piece in range(BURST if burst else 1)]
                given = [prompts.next(reuse, text) for text in texts]
                chosen = {name: systems[name] for name in names if name in systems}
                cells.append(_measure(chosen, given, reuse, burst, chance, forget=0 not in shares))
        say(
            f"{f'round {number} of {num_rounds}' if number else 'warming up'}: "
            f"{time.monotonic() - began:.0f} s"
        )
        if number:
            yield cells


def _cells(reuse: int) -> list[tuple[tuple[str, ...], bool]]:
    """Return a round's cells for this share: systems, and whether it is a burst."""
    everyone = (RECOMPUTE, LIMIT, OFFLOADING, KVHOLD)
    if reuse == 0:
        few, within = (PLAIN, AGAIN, KVHOLD), (KVHOLD, LEFT_ALONE, LEFT_AGAIN)
        return [
            ((*few, *everyone), False),
            ((*few, *everyone), True),
            *[(few, burst) for burst in (False, True)] * 2,
            *[(within, burst) for burst in (False, False, True)] * 2,
        ]
    if reuse == 100:
        return [((PLAIN, *everyone), False), (everyone, True), *[((LIMIT, KVHOLD), False)] * 3]
    return [(everyone, False), (everyone, True)]


def _measure(
    systems: dict[str, System],
    prompts: list[list[int]],
    reuse: int,
    burst: bool,
    chance: random.Random,
    *,
    forget: bool,
) -> Cell:
    cell = Cell(reuse, sum(len(prompt) + OUTPUT_TOKENS for prompt in prompts), burst)
    outputs = {}
    for name in chance.sample(list(systems), len(systems)):
        system = systems[name]
        if LEFT_ALONE in systems or (forget and name != LIMIT):
            system.engine.reset_prefix_cache()
        served = system.serve(prompts, max_tokens=OUTPUT_TOKENS)
        cell.seconds[name], cell.cpu_s[name], cell.cached_tokens[name] = (
            served.seconds,
            served.cpu_s,
            served.cached_tokens,
        )
        outputs[name] = served.token_ids
    _compare(outputs, reuse)
    return cell


def _compare(outputs: dict[str, list[list[int]]], reuse: int) -> None:
    (first, expected), *others = outputs.items()
    for name, output in others:
        if output != expected:
            raise OutputsDiffer(
                f"at {reuse} % reuse {first} answered {expected} and {name} {output} to "
                "the same prompt"
            )


class _Prompts:
    def __init__(self, model: ModelInfo, num_tokens: int) -> None:
        self._path = model.path
        self._num_tokens = num_tokens
        self._known: dict[tuple[int, str], list[int]] = {}
        self._made = 0

    def next(self, reuse: int, text: str) -> list[int]:
        self._made += 1
        num_known = self._num_tokens * reuse // 100
        if (reuse, text) not in self._known:
            self._known[reuse, text] = make_prompt(
                self._path, num_known, seed=_FIRST_KNOWN + len(self._known)
            )
        return self._known[reuse, text] + make_prompt(
            self._path, self._num_tokens - num_known, seed=self._made
        )
