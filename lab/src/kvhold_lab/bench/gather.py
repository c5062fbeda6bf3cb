"""Gather and scatter in host memory, beside memcpy by as many threads."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from kvhold.core.layout import Group, Layout
from kvhold.kernels import Chunks, gather, plan_blocks, scatter, warm_up
from kvhold.memory.views import per_layer
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, rate_row

LAYOUT = Layout(
    groups=(Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16"),),
    tokens_per_chunk=256,
)
TOKENS_PER_BLOCK = 16
NUM_CHUNKS = 8  # 256 MiB
ROUNDS = 9
THREADS = (1, 2)


def rows(profiles: Profiles | None = None) -> list[Row]:
    profiles = profiles or Profiles()
    arena = touched(NUM_CHUNKS * LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk))
    engine = GatherEngine(NUM_CHUNKS)
    offsets = np.arange(NUM_CHUNKS, dtype=np.int64) * (arena.size // NUM_CHUNKS)
    chunks = Chunks(arena, offsets, np.full(NUM_CHUNKS, LAYOUT.tokens_per_chunk, np.int64))
    plan = plan_blocks(engine.view, engine.block_ids, chunks)
    sums = np.zeros((NUM_CHUNKS, engine.view.layers), np.uint64)
    warm_up()
    with ThreadPoolExecutor(max(THREADS)) as helpers:
        work: dict[str, Callable[[], None]] = {}
        for threads in THREADS:
            number = f", {threads} thread{'s' * (threads > 1)}"
            work["memcpy" + number] = partial(memcpy, arena, engine.pool, threads, helpers)
            work["gather" + number] = partial(gather, plan, threads=threads)
            work["scatter" + number] = partial(scatter, plan, threads=threads)
            work["gather with checksums" + number] = partial(
                gather, plan, threads=threads, sums=sums
            )
            work["scatter with checksums" + number] = partial(
                scatter, plan, threads=threads, sums=sums
            )
        seconds = in_turn(work, rounds=ROUNDS)
        measured = []
        for name, call in work.items():
            verb, _, number = name.partition(", ")
            if verb != "memcpy":
                row = rate_row(name, arena.size, seconds[name], seconds[f"memcpy, {number}"])
                measured.append(profiles.of(row, partial(of_calls, call)))
    return measured


class GatherEngine:
    """A random half of the blocks belongs to `num_chunks` chunks."""

    def __init__(self, num_chunks: int) -> None:
        (group,) = LAYOUT.groups
        blocks = num_chunks * LAYOUT.tokens_per_chunk // TOKENS_PER_BLOCK
        self.pool = touched(2 * num_chunks * LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk))
        shape = (group.planes, 2 * blocks, TOKENS_PER_BLOCK, group.heads, group.head_dim)
        tensors = [
            part.view(np.uint16).reshape(shape) for part in np.split(self.pool, group.layers)
        ]
        self.view = per_layer(group, tensors, axes="plane block token head dim")
        self.block_ids = np.random.default_rng(0).permutation(2 * blocks)[:blocks]


def touched(nbytes: int) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes], page-aligned, present."""
    page = 4096
    raw = np.empty(nbytes + page, np.uint8)
    skip = -raw.ctypes.data % page
    region = raw[skip : skip + nbytes]
    region[:] = 1
    return region


def memcpy(
    to: npt.NDArray[np.uint8],
    source: npt.NDArray[np.uint8],
    threads: int,
    helpers: ThreadPoolExecutor,
) -> None:
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = (
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        ctypes.c_void_p,
    )
    piece = to.size // threads
    others = [
        helpers.submit(copy, to.ctypes.data + n * piece, source.ctypes.data + n * piece, piece)
        for n in range(1, threads)
    ]
    copy(to.ctypes.data, source.ctypes.data, piece)
    for other in others:
        other.result()
