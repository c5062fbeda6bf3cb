"""Copies of every worker against the slow way, for tests."""

from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64_intdigest

from kvhold.kernels import Chunks, Plan, View, Worker, gather, scatter
from tests.kernels.engines import ARRANGEMENTS, Engine, arena_for, slowly

WORKERS: tuple[Worker, ...] = ("reference", "numba", "triton")
PAGED = [kind for kind in ARRANGEMENTS if kind != "opaque"]
SLOTS = [3, 4, 5, 6, 7, -1, 2, 20, 10, 9, -7, 11, 12, 13, 14, 27, 0, 1]
TOKENS_OF = [8, 0, 7, 1, 2]


def check(
    build: Callable[[], Engine],
    plan: Callable[[View, Chunks], Plan],
    tokens: list[int],
    slots: list[int],
    **how: object,
) -> None:
    """Both directions against the slow way, over all memory involved: what was not to be touched
    was not.
    """
    gap = int(how.pop("gap", 64))  # type: ignore[call-overload]
    first = int(how.pop("first", 128))  # type: ignore[call-overload]
    for to_arena in (True, False):
        ours, theirs = build(), build()
        chunks, expected = (
            arena_for(engine.view, tokens, gap=gap, first=first) for engine in (ours, theirs)
        )
        (gather if to_arena else scatter)(plan(ours.view, chunks), **how)  # type: ignore[arg-type]
        slowly(theirs, expected, slots, to_arena, how.get("layers"))  # type: ignore[arg-type]
        np.testing.assert_array_equal(chunks.base, expected.base)
        for mine, other in zip(ours.memory, theirs.memory, strict=True):
            np.testing.assert_array_equal(mine, other)
        if how.get("worker") != "triton" and ours.view.device == "cpu":
            check_sums(build, plan, tokens, to_arena, gap=gap, first=first, **how)


def check_sums(
    build: Callable[[], Engine],
    plan: Callable[[View, Chunks], Plan],
    tokens: list[int],
    to_arena: bool,
    *,
    gap: int,
    first: int,
    **how: object,
) -> None:
    """The same copy with checksums moves the same bytes, and its checksums are those that the
    library takes of the arena.
    """
    plain, summed = build(), build()
    expected, chunks = (
        arena_for(engine.view, tokens, gap=gap, first=first) for engine in (plain, summed)
    )
    verb: Callable[..., None] = gather if to_arena else scatter
    verb(plan(plain.view, expected), **how)
    planned = plan(summed.view, chunks)
    sums = np.full((len(tokens), summed.view.layers), 7, np.uint64)
    verb(planned, sums=sums, **how)
    np.testing.assert_array_equal(chunks.base, expected.base)
    for mine, other in zip(summed.memory, plain.memory, strict=True):
        np.testing.assert_array_equal(mine, other)
    layers = how.get("layers") or range(summed.view.layers)
    for chunk, start in enumerate(chunks.offsets):
        size = int(planned.chunk_rows[chunk]) * summed.view.planes * summed.view.row_bytes
        for layer in range(summed.view.layers):
            at = int(start) + layer * size
            moved = layer in layers and chunk in planned.chunk  # type: ignore[operator]
            assert sums[chunk, layer] == (
                xxh3_64_intdigest(chunks.base[at : at + size]) if moved else 7
            )
