"""Gather and scatter in host memory, beside a memcpy of the same bytes by the same number of threads.

A Llama-3-8B: 32 layers, 8 KV heads of 128, bfloat16, K and V in one tensor a layer, blocks of 16 tokens taken at random into chunks of 256.
The limit is libc's memcpy, one call a thread, from the same pool to the same arena; streaming with its own prefetch, kvhold's copy may pass
it. All memory is touched before, and all are measured in turn, round by round, so that a neighbour's noise falls on all of them.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvhold.core.layout import Group, Layout
from kvhold.kernels import Chunks, gather, plan_blocks, scatter, warm_up
from kvhold.lab.bench.profiles import Profiles, of_calls
from kvhold.lab.bench.rows import Row, in_turn, rate_row
from kvhold.memory.views import per_layer

LAYOUT = Layout(groups=(Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16"),), tokens_per_chunk=256)
TOKENS_PER_BLOCK = 16
NUM_CHUNKS = 8  # 256 MiB, several times any cache; the pool holds twice as many
ROUNDS = 9
THREADS = (1, 2)


def rows(profiles: Profiles | None = None) -> list[Row]:
    """Measure. Takes some 5 seconds and 768 MiB."""
    profiles = profiles or Profiles()
    (group,) = LAYOUT.groups
    chunk_bytes = LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk)
    blocks = NUM_CHUNKS * LAYOUT.tokens_per_chunk // TOKENS_PER_BLOCK
    pool, arena = _touched(2 * NUM_CHUNKS * chunk_bytes), _touched(NUM_CHUNKS * chunk_bytes)
    shape = (group.planes, 2 * blocks, TOKENS_PER_BLOCK, group.heads, group.head_dim)
    tensors = [part.view(np.uint16).reshape(shape) for part in np.split(pool, group.layers)]
    view = per_layer(group, tensors, axes="plane block token head dim")
    block_ids = np.random.default_rng(0).permutation(2 * blocks)[:blocks]
    offsets = np.arange(NUM_CHUNKS, dtype=np.int64) * chunk_bytes
    plan = plan_blocks(view, block_ids, Chunks(arena, offsets, np.full(NUM_CHUNKS, LAYOUT.tokens_per_chunk, np.int64)))
    warm_up()
    with ThreadPoolExecutor(max(THREADS)) as helpers:
        work: dict[str, Callable[[], None]] = {}
        for threads in THREADS:
            work[f"memcpy {threads}"] = lambda threads=threads: _memcpy(arena, pool, threads, helpers)  # type: ignore[misc]
            work[f"gather {threads}"] = lambda threads=threads: gather(plan, threads=threads)  # type: ignore[misc]
            work[f"scatter {threads}"] = lambda threads=threads: scatter(plan, threads=threads)  # type: ignore[misc]
        seconds = in_turn(work, rounds=ROUNDS)
        measured = []
        for verb in ("gather", "scatter"):
            for threads in THREADS:
                name = f"{verb}, {threads} thread{'s' * (threads > 1)}"
                row = rate_row(name, arena.size, seconds[f"{verb} {threads}"], seconds[f"memcpy {threads}"])
                measured.append(profiles.of(row, lambda verb=verb, threads=threads: of_calls(work[f"{verb} {threads}"])))  # type: ignore[misc]
    return measured


def _touched(nbytes: int) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes] from a page's beginning on, every page of it present."""
    page = 4096
    raw = np.empty(nbytes + page, np.uint8)
    skip = -raw.ctypes.data % page
    region = raw[skip : skip + nbytes]
    region[:] = 1
    return region


def _memcpy(to: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], threads: int, helpers: ThreadPoolExecutor) -> None:
    """Copy `to.size` bytes in one piece a thread; ctypes lets go of the GIL."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    piece = to.size // threads
    others = [helpers.submit(copy, to.ctypes.data + n * piece, source.ctypes.data + n * piece, piece) for n in range(1, threads)]
    copy(to.ctypes.data, source.ctypes.data, piece)
    for other in others:
        other.result()
