from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kvhold.core.layout import Group, Layout
from kvhold.kernels import Chunks, Plan, gather, plan_blocks, plan_slots, scatter, warm_up
from kvhold.memory.views import per_layer
from kvhold_lab.bench.gpu.rows import GpuRow, check, rate
from kvhold_lab.bench.gpu.target import Target

PART = "kernels"
LLAMA = Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16")
ODD = Group(layers=3, planes=2, heads=3, head_dim=7, dtype="bfloat16")
TOKENS_PER_BLOCK, TOKENS_PER_CHUNK = 16, 256
ARRANGEMENTS = {"NHD": "plane block token head dim", "HND": "plane block head token dim"}


def rows(target: Target) -> Iterator[GpuRow]:
    warm_up(target.device.type)
    for group in (replace(LLAMA, layers=2) if target.small else LLAMA, ODD):
        for name, axes in ARRANGEMENTS.items():
            for place in ("device", "pinned host") if target.kind == "cuda" else ("device",):
                yield from _one(target, group, name, axes, place)


def _one(target: Target, group: Group, name: str, axes: str, place: str) -> Iterator[GpuRow]:
    plan, tensors, base = _setting(target, group, axes, place)
    title = f"{name}, {place}"
    for verb, call, written in (("gather", gather, [base]), ("scatter", scatter, tensors)):
        results = []
        for worker in (None, "reference"):
            for tensor in written:
                tensor.view(torch.uint8).fill_(0xA5)
            call(plan, worker=worker)
            target.synchronize()
            results.append([tensor.view(torch.uint8).cpu().clone() for tensor in written])
        right = all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
        yield check(PART, f"{verb}, {title}, bytes{', odd sizes' if group is ODD else ''}", right)
        if group is ODD:
            continue
        flat = torch.empty(plan.nbytes(group.layers), dtype=torch.uint8, device=target.device)
        piece = base[: flat.numel()]
        copy = (
            partial(piece.copy_, flat, non_blocking=True)
            if verb == "gather"
            else partial(flat.copy_, piece, non_blocking=True)
        )
        seconds = target.seconds({"ours": partial(call, plan), "copy": copy})
        yield rate(PART, f"{verb}, {title}", flat.numel(), seconds["ours"], seconds["copy"], None)


def _setting(
    target: Target, group: Group, axes: str, place: str
) -> tuple[Plan, list[Any], torch.Tensor]:
    num_chunks = 2 if target.small else 16
    blocks = 2 * num_chunks * TOKENS_PER_CHUNK // TOKENS_PER_BLOCK
    sizes = {
        "plane": group.planes,
        "block": blocks,
        "token": TOKENS_PER_BLOCK,
        "head": group.heads,
        "dim": group.head_dim,
    }
    shape = [sizes[axis] for axis in axes.split()]
    tensors = [
        torch.randint(0, 1 << 15, shape, dtype=torch.int16, device=target.device).view(
            torch.bfloat16
        )
        for _ in range(group.layers)
    ]
    num_tokens = np.full(num_chunks, TOKENS_PER_CHUNK, np.int64)
    if group is ODD:
        num_tokens[-1] = 101
    layout = Layout(groups=(group,), tokens_per_chunk=TOKENS_PER_CHUNK)
    chunk_bytes = layout.chunk_bytes(0, TOKENS_PER_CHUNK) + 6 * (group is ODD)
    base = torch.randint(0, 256, (num_chunks * chunk_bytes,), dtype=torch.uint8)
    if target.kind == "cuda":
        base = base.cuda() if place == "device" else base.pin_memory()
    offsets = np.arange(num_chunks, dtype=np.int64) * chunk_bytes
    memory = base if target.kind == "cuda" else base.numpy()
    chunks = Chunks(memory, offsets, num_tokens, device_address=base.data_ptr())
    view = per_layer(group, tensors, axes=axes)
    rng = np.random.default_rng(0)
    if group is not ODD:
        return plan_blocks(view, rng.permutation(blocks)[: blocks // 2], chunks), tensors, base
    slots = rng.permutation(view.num_rows)[: int(num_tokens.sum())]
    slots[::5] = -1
    return plan_slots(view, slots, chunks), tensors, base
