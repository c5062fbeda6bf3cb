"""Is the GPU copy right, and how fast is it? Run it on a machine with an NVIDIA or AMD GPU, torch and Triton:

    python benchmarks/gpu_check.py

Gathers and scatters a Llama-3-8B's KV (NHD and HND, and odd sizes for the check alone) between blocks on the GPU and chunks, first in a
staging tensor on the device, then in pinned host memory. Each result is compared, byte for byte, with plain torch indexing; each time is
printed beside torch's, and beside the limit: one copy of the same bytes by the driver. Exits with 1 if a byte is wrong, and with 0,
saying so, where there is no GPU.
"""

import importlib.util
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from kvhold.core.layout import Group, Layout
from kvhold.kernels import Chunks, Plan, gather, plan_blocks, plan_slots, scatter, warm_up
from kvhold.memory.views import per_layer

LLAMA = Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16")
ODD = Group(layers=3, planes=2, heads=3, head_dim=7, dtype="bfloat16")
TOKENS_PER_BLOCK, TOKENS_PER_CHUNK, NUM_CHUNKS = 16, 256, 16
ARRANGEMENTS = {"NHD": "plane block token head dim", "HND": "plane block head token dim"}
ROUNDS = 11


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        print("not run: no torch")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("not run: no GPU")
        return 0
    if importlib.util.find_spec("triton") is None:
        print("not run: no Triton")
        return 0
    warm_up("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; Llama-3-8B, {NUM_CHUNKS} chunks of {TOKENS_PER_CHUNK} tokens\n")
    line = "{:<34} {:>8} {:>8} {:>8} {:>6}  {}"
    print(line.format("GB/s", "kvhold", "torch", "driver", "ratio", "bytes"))
    wrong = 0
    for group in (LLAMA, ODD):
        for name, axes in ARRANGEMENTS.items():
            for place in ("device", "pinned host"):
                for verb in ("gather", "scatter"):
                    right, rates = _one(torch, group, axes, place, verb)
                    wrong += not right
                    title = f"{verb} {name}, {place}{', odd sizes' if group is ODD else ''}"
                    numbers = [f"{rate:.1f}" for rate in rates] + [f"{rates[0] / rates[2]:.2f}"] if rates else [""] * 4
                    print(line.format(title, *numbers, "right" if right else "WRONG"))
    return 1 if wrong else 0


def _one(torch: Any, group: Group, axes: str, place: str, verb: str) -> tuple[bool, list[float]]:
    """Whether the bytes are right, and GB/s of ours, torch's and the driver's (none for the odd sizes)."""
    plan, tensors, base = _setting(torch, group, axes, place)
    call = gather if verb == "gather" else scatter
    target = [base] if verb == "gather" else tensors
    results = []
    for worker in ("triton", "reference"):
        for tensor in target:
            tensor.view(torch.uint8).fill_(0xA5)
        call(plan, worker=worker)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        results.append([tensor.view(torch.uint8).cpu().clone() for tensor in target])
    right = all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    if group is ODD:
        return right, []
    flat = torch.empty(plan.nbytes(group.layers), dtype=torch.uint8, device="cuda")
    piece = base[: flat.numel()]
    driver = (lambda: piece.copy_(flat, non_blocking=True)) if verb == "gather" else (lambda: flat.copy_(piece, non_blocking=True))
    calls = {"ours": lambda: call(plan), "torch": lambda: call(plan, worker="reference"), "driver": driver}
    return right, [plan.nbytes(group.layers) / seconds / 1e9 for seconds in _in_turn(torch, calls)]


def _setting(torch: Any, group: Group, axes: str, place: str) -> tuple[Plan, list[Any], Any]:
    """Random KV on the device, twice as many blocks as are moved, and chunks of random bytes in the given place."""
    odd = group is ODD
    blocks = 2 * NUM_CHUNKS * TOKENS_PER_CHUNK // TOKENS_PER_BLOCK
    sizes = {"plane": group.planes, "block": blocks, "token": TOKENS_PER_BLOCK, "head": group.heads, "dim": group.head_dim}
    shape = [sizes[axis] for axis in axes.split()]
    tensors = [torch.randint(0, 1 << 15, shape, dtype=torch.int16, device="cuda").view(torch.bfloat16) for _ in range(group.layers)]
    num_tokens = np.full(NUM_CHUNKS, TOKENS_PER_CHUNK, np.int64)
    if odd:
        num_tokens[-3:] = 101, 0, 1
    layout = Layout(groups=(group,), tokens_per_chunk=TOKENS_PER_CHUNK)
    chunk_bytes = layout.chunk_bytes(0, TOKENS_PER_CHUNK) + 6 * odd
    base = torch.randint(0, 256, (NUM_CHUNKS * chunk_bytes,), dtype=torch.uint8)
    base = base.cuda() if place == "device" else base.pin_memory()
    offsets = np.arange(NUM_CHUNKS, dtype=np.int64) * chunk_bytes
    chunks = Chunks(base, offsets, num_tokens, device_address=base.data_ptr())
    view = per_layer(group, tensors, axes=axes)
    rng = np.random.default_rng(0)
    if not odd:
        return plan_blocks(view, rng.permutation(blocks)[: blocks // 2], chunks), tensors, base
    slots = rng.permutation(view.num_rows)[: int(num_tokens.sum())]
    slots[::5] = -1
    return plan_slots(view, slots, chunks), tensors, base


def _in_turn(torch: Any, calls: dict[str, Callable[[], object]]) -> list[float]:
    """Median seconds of each by the device's own clock, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + ROUNDS):
        for name, call in calls.items():
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            call()
            ended.record()
            ended.synchronize()
            seconds[name].append(begun.elapsed_time(ended) / 1e3)
    return [median(times[1:]) for times in seconds.values()]


if __name__ == "__main__":
    sys.exit(main())
