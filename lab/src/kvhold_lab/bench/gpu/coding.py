from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from kvhold.core.layout import Group
from kvhold.kernels import Chunks, gather, plan_blocks, scatter, warm_up
from kvhold.memory.coding import coded_view
from kvhold.memory.views import opaque_blocks
from kvhold_lab.bench.gpu.rows import GpuRow, check, rate
from kvhold_lab.bench.gpu.target import Target

PART = "coding"
_BLOCK, _WIDTH = 16, 2 * 8 * 128


def rows(target: Target) -> Iterator[GpuRow]:
    warm_up(target.device.type)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from _of_dtype(target, dtype, measured=dtype is torch.bfloat16)


def _of_dtype(target: Target, dtype: torch.dtype, *, measured: bool) -> Iterator[GpuRow]:
    blocks, layers = (16, 2) if target.small else (256, 32)
    name = str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(0)
    group = Group(
        layers=layers,
        planes=2,
        heads=8,
        head_dim=128,
        dtype=name,
        packing="blocks",
        block_tokens=_BLOCK,
        block_bytes=_BLOCK * _WIDTH * dtype.itemsize,
    )
    on_host = [
        (torch.randn(blocks, _BLOCK * _WIDTH, generator=generator) * 8).to(dtype)
        for _ in range(layers)
    ]
    on_device = [tensor.to(target.device, copy=True) for tensor in on_host]
    chunk_bytes = (
        layers
        * blocks
        * coded_view(opaque_blocks(group, on_host, block_axis=0), "int8").group.block_bytes
    )
    ids, found = np.random.default_rng(0).permutation(blocks).astype(np.int64), []
    plans = []
    for tensors, device in ((on_host, "cpu"), (on_device, target.device)):
        base = torch.zeros(chunk_bytes, dtype=torch.uint8, device=device)
        view = coded_view(opaque_blocks(group, tensors, block_axis=0), "int8")
        memory = base if target.kind == "cuda" and device != "cpu" else base.numpy()
        plans.append(
            plan_blocks(
                view, ids, Chunks(memory, np.zeros(1, np.int64), np.array([blocks * _BLOCK]))
            )
        )
        gather(plans[-1])
        target.synchronize()
        found.append(base.cpu().clone())
    yield check(PART, f"encode, {name}, bits", torch.equal(*found))
    for plan in plans:
        scatter(plan)
    target.synchronize()
    same = all(
        torch.equal(theirs.view(torch.uint8), ours.cpu().view(torch.uint8))
        for theirs, ours in zip(on_host, on_device, strict=True)
    )
    yield check(PART, f"decode, {name}, bits", same)
    if measured:
        flat = torch.empty(
            sum(tensor.nbytes for tensor in on_device), dtype=torch.uint8, device=target.device
        )
        spare = torch.empty_like(flat)
        for verb, call in (("encode", gather), ("decode", scatter)):
            seconds = target.seconds(
                {
                    "ours": partial(call, plans[1]),
                    "copy": partial(spare.copy_, flat, non_blocking=True),
                }
            )
            yield rate(
                PART, f"{verb}, {name}", flat.numel(), seconds["ours"], seconds["copy"], None
            )
