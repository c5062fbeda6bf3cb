"""Stores and loads by size of pieces. The limit is a copy in one piece."""

from collections.abc import Iterator

import numpy as np
import torch

from kvhold.memory.copier import Copier, Piece
from kvhold.memory.device import Settings
from kvhold_lab.bench.gpu.rows import GpuRow, check, rate
from kvhold_lab.bench.gpu.sample import BLOCKS_A_CHUNK, SIZES, CopySample
from kvhold_lab.bench.gpu.target import Target

PART = "pieces"
_DIRECT, _RING = Settings(direct_bytes=1), Settings(direct_bytes=1 << 40)


def rows(target: Target) -> Iterator[GpuRow]:
    for name, piece_bytes in SIZES.items():
        yield from _of_size(target, name, piece_bytes)


def _of_size(target: Target, name: str, piece_bytes: int) -> Iterator[GpuRow]:
    sample = CopySample(
        target,
        piece_bytes=piece_bytes,
        total_bytes=(2 if target.small else 256) << 20,
        layers=_layers(target, piece_bytes),
    )
    ways = (
        {"": None}
        if target.driver is None
        else {"": None, ", by the ring": _RING, ", directly": _DIRECT}
    )
    for way, settings in ways.items():
        copier = target.copier(sample.buffer, sample.buffer, settings)
        exact = _is_exact(copier, sample)
        goal = None if way else target.goal(0.90 if piece_bytes >= 64 << 10 else 0.80)
        yield from _measured(target, copier, sample, f"{name}{way}", goal)
        if not way:
            yield from _with_checksums(target, copier, sample, name)
        copier.close()
        yield check(PART, f"bytes, {name}{way}", exact)


def _layers(target: Target, piece_bytes: int) -> int:
    is_large = piece_bytes >= 1 << 20
    return (1 if is_large else 2) if target.small else 4 if is_large else 32


def _measured(
    target: Target, copier: Copier, sample: CopySample, name: str, goal: float | None
) -> Iterator[GpuRow]:
    piece, into, nbytes = sample.stored, sample.loaded, sample.nbytes
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
    target: Target, copier: Copier, sample: CopySample, name: str
) -> Iterator[GpuRow]:
    def store() -> None:
        with sample.reserve() as reservation:
            copier.gather([sample.store_into(reservation)], after=copier.mark()).wait()
            reservation.commit()

    def load(*, checked: bool) -> None:
        with sample.lease(checked=checked) as lease:
            if any(copier.scatter([sample.load_from(lease)], after=copier.mark()).wait()):
                raise RuntimeError("a load found damage")

    seconds = target.seconds(
        {
            "store": store,
            "plain store": lambda: copier.gather([sample.stored], after=copier.mark()).wait(),
            "load": lambda: load(checked=True),
            "plain load": lambda: load(checked=False),
        }
    )
    for verb in ("store", "load"):
        yield rate(
            PART,
            f"{verb} with checksums, {name}",
            sample.nbytes,
            seconds[verb],
            seconds[f"plain {verb}"],
            None,
        )


def _is_exact(copier: Copier, sample: CopySample) -> bool:
    piece, into, tensors = sample.stored, sample.loaded, sample.tensors
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
    sample = 0, piece.places.offsets.size - 1
    for chunk in sample:
        at = int(piece.places.offsets[chunk])
        ids = torch.from_numpy(piece.ids[chunk * BLOCKS_A_CHUNK :][:BLOCKS_A_CHUNK])
        expected = torch.cat([tensor[ids].reshape(-1) for tensor in tensors]).cpu().numpy()
        if not np.array_equal(piece.buffer[at : at + expected.size], expected.view(np.uint8)):
            return False
    return True
