"""Are the GPU's copies and codec kernels right, and how fast are they? Run it on a machine with an NVIDIA or AMD GPU, torch and Triton:

    python benchmarks/gpu_check.py

Gathers and scatters a Llama-3-8B's KV (NHD and HND, and odd sizes for the check alone) between blocks on the GPU and chunks, first in a
staging tensor on the device, then in pinned host memory. Each result is compared, byte for byte, with plain torch indexing; each time is
printed beside torch's, and beside the limit: one copy of the same bytes by the driver. Then the codecs' arithmetic (rANS, int8, fp8,
CacheGen, KIVI, TurboQuant) on KV of bfloat16: each result is compared, bit by bit, with numba's on the host, and each time printed beside
a copy of the plain bytes within the device. k8v4 is int8's keys and kivi4's values. Exits with 1 if a byte is wrong, and with 0, saying
so, where there is no GPU.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
PLANES = 64  # of a chunk, in one launch of the codecs' kernels: the K and V of all layers


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
    if importlib.util.find_spec("numba") is None:
        print("\ncodecs not checked: no numba to compare with")
    else:
        wrong += _codecs(torch, "cuda", PLANES, TOKENS_PER_CHUNK, LLAMA.heads, LLAMA.head_dim, line)
        wrong += _codecs(torch, "cuda", 3, 37, 3, 45, None)
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


@dataclass(frozen=True)
class _Case:
    """One function on the host and on the device; each returns what is compared."""

    title: str
    host: Callable[[], tuple[Any, ...]]
    device: Callable[[], tuple[Any, ...]]


def _codecs(torch: Any, device: str, planes: int, tokens: int, heads: int, head_dim: int, line: str | None) -> int:
    """How many results are wrong; `line` formats the table, None: odd sizes, of which only what is wrong is printed."""
    rng = np.random.default_rng(0)
    width = heads * head_dim
    values = rng.standard_normal((planes, tokens, width), np.float32) * 2.0 ** rng.integers(-4, 5, width)
    elements = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(-1)
    on_device = torch.from_numpy(elements).to(device)
    if line:
        print(f"\n{planes} planes of {tokens} tokens of {width} bfloat16s, {elements.nbytes >> 20} MiB plain in all\n")
        print(line.format("GB/s of plain bytes", "kvhold", "", "driver", "ratio", "bits"))
    wrong = 0
    for case in _cases(torch, elements, on_device, planes, tokens, heads, head_dim):
        expected, found = case.host(), case.device()
        right = len(expected) == len(found) and all(
            np.array_equal(theirs, ours.cpu().numpy() if isinstance(ours, torch.Tensor) else ours)
            for theirs, ours in zip(expected, found, strict=True)
        )
        wrong += not right
        if line:
            spare = torch.empty_like(on_device)
            ours, driver = _in_turn(torch, {"ours": case.device, "driver": partial(spare.copy_, on_device)})
            rates = [elements.nbytes / seconds / 1e9 for seconds in (ours, driver)]
            print(line.format(case.title, f"{rates[0]:.1f}", "", f"{rates[1]:.1f}", f"{driver / ours:.2f}", "right" if right else "WRONG"))
        elif not right:
            print(f"{case.title}, odd sizes: WRONG")
    return wrong


def _cases(torch: Any, elements: Any, on_device: Any, planes: int, tokens: int, heads: int, head_dim: int) -> Iterator[_Case]:
    """Each step with what numba makes of the one before."""
    from kvhold.kernels import (
        numba_bins,
        numba_groups,
        numba_quantise,
        numba_rans,
        numba_rans_kinds,
        numba_turns,
        triton_bins,
        triton_groups,
        triton_quantise,
        triton_rans,
        triton_rans_kinds,
        triton_turns,
    )

    def there(array: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).to(on_device.device)

    def like(array: Any) -> Any:
        return torch.empty_like(there(array))

    def filled(function: Callable[..., None], *arguments: Any) -> tuple[Any, ...]:
        """The arrays or tensors that `function` has filled."""
        function(*arguments)
        return arguments

    width, dtype = heads * head_dim, "bfloat16"
    yield _Case("split", lambda: (numba_rans.split(elements),), lambda: (triton_rans.split(on_device),))
    cut = numba_rans.split(elements)
    of_both, merged = [there(plane) for plane in cut], like(elements)
    yield _Case("merge", lambda: (elements,), lambda: filled(lambda out: triton_rans.merge(of_both, None, out), merged))
    exponents = cut[0].reshape(planes, -1)
    counts = np.stack([numba_rans.histogram(plane) for plane in exponents])
    exponents_there = there(exponents)
    yield _Case("histogram", lambda: (counts,), lambda: (triton_rans.histogram(exponents_there),))
    freq = np.stack([numba_rans.frequencies(each) for each in counts])
    coded = [numba_rans.encode(plane, table) for plane, table in zip(exponents, freq, strict=True)]
    words, segments = (np.concatenate(each) for each in zip(*coded, strict=True))
    freq_there, words_there, segments_there, symbols = there(freq), there(words), there(segments), like(exponents)
    yield _Case("rANS encode", lambda: (words, segments), lambda: triton_rans.encode(exponents_there, freq_there))
    yield _Case(
        "rANS decode",
        lambda: (True, exponents),
        lambda: (triton_rans.decode(words_there, segments_there, freq_there, symbols), symbols),
    )

    run = 128
    codes, largest = np.empty(elements.size, np.int8), np.empty(planes * tokens * heads * -(-head_dim // run), np.float32)
    numba_quantise.int8_encode(elements, dtype, head_dim, run, codes, largest)
    ours, peaks, back, plain = like(codes), like(largest), like(elements), np.empty_like(elements)
    yield _Case(
        "int8 encode",
        lambda: (codes, largest),
        lambda: filled(lambda *out: triton_quantise.int8_encode(on_device, dtype, head_dim, run, *out), ours, peaks),
    )
    codes_there, largest_there = there(codes), there(largest)
    yield _Case(
        "int8 decode",
        lambda: filled(lambda out: numba_quantise.int8_decode(codes, largest, dtype, head_dim, run, out), plain),
        lambda: filled(lambda out: triton_quantise.int8_decode(codes_there, largest_there, dtype, head_dim, run, out), back),
    )
    columns = numba_quantise.column_largest(elements, dtype, planes, width)
    yield _Case("fp8 scales", lambda: (columns,), lambda: (triton_quantise.column_largest(on_device, dtype, planes, width),))
    bytes_, columns_there = np.empty(elements.size, np.uint8), there(columns)
    numba_quantise.fp8_encode(elements, dtype, columns, bytes_)
    bytes_there, found = there(bytes_), like(bytes_)
    yield _Case(
        "fp8 encode",
        lambda: (bytes_,),
        lambda: filled(lambda out: triton_quantise.fp8_encode(on_device, dtype, columns_there, out), found),
    )
    yield _Case(
        "fp8 decode",
        lambda: filled(lambda out: numba_quantise.fp8_decode(bytes_, columns, dtype, out), plain),
        lambda: filled(lambda out: triton_quantise.fp8_decode(bytes_there, columns_there, dtype, out), back),
    )

    rows = planes * tokens
    channels = numba_bins.measure(elements, dtype, rows, width)
    yield _Case("CacheGen sums", lambda: tuple(channels), lambda: tuple(triton_bins.measure(on_device, dtype, rows, width)))
    steps = np.maximum(channels.largest / np.float32(20), np.float32(2.0**-100))
    offsets = (np.arange(width) % 7 - 3).astype(np.int8)
    deviations = numba_bins.quantise(elements, dtype, steps, offsets)
    steps_there, offsets_there = there(steps), there(offsets)
    yield _Case("CacheGen bins", lambda: (deviations,), lambda: (triton_bins.quantise(on_device, dtype, steps_there, offsets_there),))
    kinds = np.tile((np.arange(width) % 4).astype(np.uint8), rows)
    reach, odds = np.array([4, 9, 30, 63]), np.full((4, 256), 4, np.uint16)
    marked, exceptions = numba_bins.to_symbols(deviations, kinds, offsets, reach)
    deviations_there, kinds_there, reach_there, odds_there = there(deviations), there(kinds), there(reach), there(odds)
    yield _Case(
        "CacheGen symbols",
        lambda: (marked, exceptions),
        lambda: triton_bins.to_symbols(deviations_there, kinds_there, offsets_there, reach_there),
    )
    words, segments = numba_rans_kinds.encode(marked, kinds, width, odds)
    marked_there, exceptions_there, words_there, segments_there, symbols = (
        there(marked),
        there(exceptions),
        there(words),
        there(segments),
        like(marked),
    )
    yield _Case(
        "CacheGen rANS encode",
        lambda: (words, segments),
        lambda: triton_rans_kinds.encode(marked_there, kinds_there, width, odds_there),
    )
    yield _Case(
        "CacheGen rANS decode",
        lambda: (True, marked),
        lambda: (triton_rans_kinds.decode(words_there, segments_there, kinds_there, width, odds_there, symbols), symbols),
    )
    yield _Case(
        "CacheGen values",
        lambda: (numba_bins.dequantise(marked, offsets, steps, exceptions, dtype, plain), plain),
        lambda: (triton_bins.dequantise(marked_there, offsets_there, steps_there, exceptions_there, dtype, back), back),
    )

    plane = elements.reshape(rows, width)
    full = rows // numba_groups.GROUP
    for bits in (4, 2):
        row_bytes = numba_groups.packed_width(width, bits)
        yield from _both_ways(
            there,
            f"kivi{bits} keys",
            (numba_groups.columns_encode, numba_groups.columns_decode),
            (triton_groups.columns_encode, triton_groups.columns_decode),
            plane[: full * numba_groups.GROUP],
            {"ends": np.empty((full, 2, width), np.uint16), "codes": np.empty((full * numba_groups.GROUP, row_bytes), np.uint8)},
            {"dtype": dtype, "bits": bits},
        )
        ends = np.empty((rows, 2, numba_groups.num_groups(width, head_dim)), np.uint16)
        yield from _both_ways(
            there,
            f"kivi{bits} values",
            (numba_groups.rows_encode, numba_groups.rows_decode),
            (triton_groups.rows_encode, triton_groups.rows_decode),
            plane,
            {"ends": ends, "codes": np.empty((rows, row_bytes), np.uint8)},
            {"dtype": dtype, "bits": bits, "head_dim": head_dim},
        )

    in_heads = rows * heads, len(numba_turns.run_sizes(head_dim))
    limit = 2.0  # some vectors would be off by more
    yield from _both_ways(
        there,
        "turboquant4",
        (partial(numba_turns.encode, limit=limit), numba_turns.decode),
        (partial(triton_turns.encode, limit=limit), triton_turns.decode),
        elements,
        {"scales": np.empty(in_heads, np.float32), "codes": np.empty((in_heads[0], numba_turns.head_bytes(head_dim)), np.uint8)},
        {"dtype": dtype, "head_dim": head_dim},
    )


def _both_ways(
    there: Callable[[Any], Any],
    title: str,
    on_host: tuple[Callable[..., None], Callable[..., None]],
    on_device: tuple[Callable[..., None], Callable[..., None]],
    elements: Any,
    parts: dict[str, Any],
    options: dict[str, Any],
) -> Iterator[_Case]:
    """An encoder that fills `parts`, and the decoder that fills elements from them; `there` copies an array to the device."""

    def run(function: Callable[..., None], elements: Any, parts: dict[str, Any], *filled: Any) -> tuple[Any, ...]:
        function(elements=elements, **parts, **options)
        return filled

    found, source = {name: there(part) for name, part in parts.items()}, there(elements)
    yield _Case(
        f"{title} encode",
        lambda: run(on_host[0], elements, parts, *parts.values()),
        lambda: run(on_device[0], source, found, *found.values()),
    )
    given, plain, back = {name: there(part) for name, part in parts.items()}, np.empty_like(elements), there(np.zeros_like(elements))
    yield _Case(f"{title} decode", lambda: run(on_host[1], plain, parts, plain), lambda: run(on_device[1], back, given, back))


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
