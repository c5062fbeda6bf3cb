"""Stores and loads with pieces of 8, 18, 64 KiB and 2 MiB, by the serving copier.

The limit is a copy of pinned memory in one piece. The rows with checksums are what an engine waits
for: a store takes the checksums, and a load compares them, on the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvhold.core.holdings import ChunkBytes, Lease, Reservation
from kvhold.core.layout import Group, Layout
from kvhold.memory.copier import Copier, Piece
from kvhold.memory.copy import warm_up
from kvhold.memory.device import Settings
from kvhold.memory.views import opaque_blocks
from kvhold_lab.bench.gpu.rows import GpuRow, check, rate
from kvhold_lab.bench.gpu.target import Target

PART = "pieces"
SIZES = {"8 KiB": 8 << 10, "18 KiB": 18 << 10, "64 KiB": 64 << 10, "2 MiB": 2 << 20}
_BLOCKS_A_CHUNK = 8
_DIRECT, _RING = Settings(direct_bytes=1), Settings(direct_bytes=1 << 40)


def rows(target: Target) -> Iterator[GpuRow]:
    for name, piece_bytes in SIZES.items():
        yield from _of_size(target, name, piece_bytes)


def _of_size(target: Target, name: str, piece_bytes: int) -> Iterator[GpuRow]:
    total = (8 if target.small else 256) << 20
    layers = 32 if piece_bytes < 1 << 20 else 4
    chunk_bytes = layers * _BLOCKS_A_CHUNK * piece_bytes
    chunks = max(1, total // chunk_bytes)
    blocks = 2 * chunks * _BLOCKS_A_CHUNK
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
        torch.randint(0, 256, (blocks, piece_bytes), dtype=torch.uint8, device=target.device)
        for _ in range(layers)
    ]
    view = opaque_blocks(group, tensors, block_axis=0)
    warm_up(view.device, [view])
    ids = np.random.default_rng(0).permutation(blocks)
    stored, loaded = ids[: blocks // 2], ids[blocks // 2 :]
    tokens = np.full(chunks, _BLOCKS_A_CHUNK * 16, np.int64)
    buffer, places = (
        target.arena(chunks * chunk_bytes),
        ChunkBytes(np.arange(chunks) * chunk_bytes, tokens),
    )
    piece, into = Piece(view, stored, buffer, places), Piece(view, loaded, buffer, places)
    ways = (
        {"": None}
        if target.driver is None
        else {"": None, ", by the ring": _RING, ", directly": _DIRECT}
    )
    for way, settings in ways.items():
        copier = target.copier(buffer, buffer, settings)
        exact = _is_exact(copier, piece, into, tensors)
        goal = None if way else target.goal(0.90 if piece_bytes >= 64 << 10 else 0.80)
        yield from _measured(target, copier, (piece, into), f"{name}{way}", goal)
        if not way:
            yield from _with_checksums(target, copier, (piece, into), group, name)
        copier.close()
        yield check(PART, f"bytes, {name}{way}", exact)


def _measured(
    target: Target, copier: Copier, pieces: tuple[Piece, Piece], name: str, goal: float | None
) -> Iterator[GpuRow]:
    piece, into = pieces
    nbytes = piece.buffer.size
    host, flat = target.pinned(nbytes), torch.zeros(nbytes, dtype=torch.uint8, device=target.device)
    calls = {
        "store": lambda: copier.gather([piece], after=copier.mark()).wait(),
        "limit of store": lambda: host.copy_(flat, non_blocking=True),
        "load": lambda: copier.scatter([into], after=copier.mark()).wait(),
        "limit of load": lambda: flat.copy_(host, non_blocking=True),
    }
    seconds = target.seconds(calls)
    for verb in ("store", "load"):
        yield rate(
            PART, f"{verb}, {name}", nbytes, seconds[verb], seconds[f"limit of {verb}"], goal
        )


def _with_checksums(
    target: Target, copier: Copier, pieces: tuple[Piece, Piece], group: Group, name: str
) -> Iterator[GpuRow]:
    """Yield the rates of a store with its commit and of a load, beside the plain copies."""
    piece, into = pieces
    places, buffer = piece.places, piece.buffer
    layout = Layout((group,), tokens_per_chunk=int(places.num_tokens[0]), tail_tokens=0)
    packed = b""

    def keep(chunks: Sequence[int], checksums: bytes) -> int:
        nonlocal packed
        packed = checksums
        return 0

    def store() -> None:
        offsets, tokens = places.offsets[None], places.num_tokens
        with Reservation(offsets, tokens, buffer, keep, _nothing, layout=layout) as reservation:
            written = replace(piece, places=reservation.chunks())
            copier.gather([written], after=copier.mark()).wait()
            reservation.commit()

    def load(checksums: list[bytes] | None) -> None:
        offsets, tokens = places.offsets[None], places.num_tokens
        with Lease(offsets, tokens, 0, buffer, _nothing, checksums=checksums) as lease:
            read = replace(into, places=lease.chunks())
            if any(copier.scatter([read], after=copier.mark()).wait()):
                raise RuntimeError("a load found damage")

    seconds = target.seconds(
        {
            "store": store,
            "plain store": lambda: copier.gather([piece], after=copier.mark()).wait(),
            "load": lambda: load([packed]),
            "plain load": lambda: load(None),
        }
    )
    for verb in ("store", "load"):
        yield rate(
            PART,
            f"{verb} with checksums, {name}",
            buffer.size,
            seconds[verb],
            seconds[f"plain {verb}"],
            None,
        )


def _nothing() -> None:
    pass


def _is_exact(copier: Copier, piece: Piece, into: Piece, tensors: list[torch.Tensor]) -> bool:
    for tensor in tensors:
        tensor[torch.from_numpy(into.ids)] = 0
    piece.buffer[:] = 0
    copier.gather([piece], after=copier.mark()).wait()
    if not _holds(piece, tensors):
        return False
    copier.scatter([into], after=copier.mark()).wait()
    return all(
        torch.equal(tensor[torch.from_numpy(into.ids)], tensor[torch.from_numpy(piece.ids)])
        for tensor in tensors
    )


def _holds(piece: Piece, tensors: list[torch.Tensor]) -> bool:
    """Compare host and device, since a wrong address would be read back from there, too."""
    sample = 0, piece.places.offsets.size - 1
    for chunk in sample:
        at = int(piece.places.offsets[chunk])
        ids = torch.from_numpy(piece.ids[chunk * _BLOCKS_A_CHUNK :][:_BLOCKS_A_CHUNK])
        expected = torch.cat([tensor[ids].reshape(-1) for tensor in tensors]).cpu().numpy()
        if not np.array_equal(piece.buffer[at : at + expected.size], expected.view(np.uint8)):
            return False
    return True
