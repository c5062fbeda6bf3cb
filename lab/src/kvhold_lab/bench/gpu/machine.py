import time
from collections.abc import Iterator
from functools import partial

import torch

from kvhold.memory.device import PinnedArenas
from kvhold_lab.bench.gpu.rows import GpuRow, check
from kvhold_lab.bench.gpu.target import Target

PART = "machine"


def rows(target: Target) -> Iterator[GpuRow]:
    nbytes = (16 if target.small else 512) << 20
    here, there = (
        target.pinned(nbytes),
        torch.zeros(nbytes, dtype=torch.uint8, device=target.device),
    )
    back, other = (
        target.pinned(nbytes),
        torch.zeros(nbytes, dtype=torch.uint8, device=target.device),
    )
    calls = {
        "host to device": partial(there.copy_, here, non_blocking=True),
        "device to host": partial(back.copy_, there, non_blocking=True),
        "within the device": partial(other.copy_, there),
        "both ways at once": partial(_both_ways, target, here, there, other, back),
    }
    for name, seconds in target.seconds(calls).items():
        moved = 2 * nbytes if name == "both ways at once" else nbytes
        yield GpuRow(PART, name, round(moved / seconds / 1e9, 2), "GB/s")
    yield from _pinning(target)


def _both_ways(
    target: Target, here: torch.Tensor, there: torch.Tensor, other: torch.Tensor, back: torch.Tensor
) -> None:
    if target.kind != "cuda":
        there.copy_(here)
        back.copy_(other)
        return
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream, (to, of) in zip(streams, ((there, here), (back, other)), strict=True):
        with torch.cuda.stream(stream):
            to.copy_(of, non_blocking=True)


def _pinning(target: Target) -> Iterator[GpuRow]:
    if target.driver is None:
        return
    nbytes = (64 if target.small else 4096) << 20
    arena, arenas = target.arena(nbytes), PinnedArenas(target.driver)
    began_s = time.perf_counter()
    arenas.add(arena, arena)
    arenas.wait()
    pinned_s = time.perf_counter() - began_s
    yield check(PART, "all of an arena is pinned", arenas.pinned_bytes == nbytes)
    began_s = time.perf_counter()
    arenas.close()
    yield GpuRow(PART, "pinning, per GiB", round(pinned_s / (nbytes / (1 << 30)), 4), "s")
    yield GpuRow(
        PART,
        "unpinning, per GiB",
        round((time.perf_counter() - began_s) / (nbytes / (1 << 30)), 4),
        "s",
    )
