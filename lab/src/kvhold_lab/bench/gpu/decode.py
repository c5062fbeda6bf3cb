"""How much copies slow a decoding engine: matrix products of a small batch, with and without
copies.
"""

import threading
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch

from kvhold.core.holdings import ChunkBytes
from kvhold.core.layout import Group
from kvhold.memory.copier import Copier, Piece, Transfer
from kvhold.memory.copy import warm_up
from kvhold.memory.views import opaque_blocks
from kvhold_lab.bench.gpu.rows import GpuRow
from kvhold_lab.bench.gpu.target import Target

PART = "decode"
_MOST_SLOWER = 1.02


def rows(target: Target) -> Iterator[GpuRow]:
    width, layers, piece_bytes, blocks = (
        (256, 4, 8 << 10, 64) if target.small else (4096, 32, 64 << 10, 512)
    )
    dtype = torch.float32 if target.small else torch.bfloat16
    weights = [torch.randn(width, width, device=target.device, dtype=dtype) for _ in range(layers)]
    state = torch.randn(8, width, device=target.device, dtype=dtype)
    group = Group(
        layers=layers,
        planes=2,
        heads=1,
        head_dim=8,
        dtype="int8",
        packing="bench",
        block_tokens=16,
        block_bytes=piece_bytes,
    )
    tensors = [
        torch.zeros(blocks, piece_bytes, dtype=torch.uint8, device=target.device)
        for _ in range(layers)
    ]
    view = opaque_blocks(group, tensors, block_axis=0)
    warm_up(view.device, [view])

    def decode() -> None:
        for _ in range(4 if target.small else 32):
            out = state
            for weight in weights:
                out = out @ weight

    nbytes = layers * blocks * piece_bytes
    buffer, chunks = target.arena(nbytes), blocks // 8
    copier = target.copier(buffer, buffer)
    piece = Piece(
        view,
        np.arange(blocks),
        buffer,
        ChunkBytes(np.arange(chunks) * (nbytes // chunks), np.full(chunks, 128)),
    )
    alone_s = _seconds(target, decode)
    for name, copy in (("stores", copier.gather), ("loads", copier.scatter)):
        stop = threading.Event()
        thread = threading.Thread(target=_keep_copying, args=(stop, copy, copier, piece))
        thread.start()
        try:
            beside_s = _seconds(target, decode)
        finally:
            stop.set()
            thread.join()
        slower = beside_s / alone_s
        ok = slower <= _MOST_SLOWER if target.kind == "cuda" else None
        if name == "loads":
            copier.close()
        yield GpuRow(
            PART,
            f"decoding beside {name}",
            round(1e3 * beside_s, 3),
            "ms",
            round(1e3 * alone_s, 3),
            round(slower, 3),
            ok,
        )


def _keep_copying(
    stop: threading.Event, copy: Callable[..., Transfer], copier: Copier, piece: Piece
) -> None:
    while not stop.is_set():
        copy([piece], after=copier.mark()).wait()


def _seconds(target: Target, decode: Callable[[], None]) -> float:
    """Return the median. Waits for its own stream only, as an engine does."""
    taken = []
    for _ in range(9):
        began_s = time.perf_counter()
        decode()
        if target.kind == "cuda":
            torch.cuda.current_stream().synchronize()
        taken.append(time.perf_counter() - began_s)
    return median(taken[1:])
