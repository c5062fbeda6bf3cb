"""Vectors turned and put into 4 bits, and back, on a GPU: what numba_turns.py does, with the same codes, scales and values, bit by bit.

    encode(elements, "bfloat16", head_dim=128, limit=limit, codes=codes, scales=scales)
    decode(codes, scales, "bfloat16", head_dim=128, elements=elements)

For who has the KV on a device: an engine's worker, or a tier of GPU memory, that encodes before bytes cross the bus, or decodes after. The
node never touches a device and uses the numba kernels. Arguments are contiguous torch tensors of one device, of the shapes and types that
the numba functions have. Nothing waits for the current stream. What is KEPT as it is, the caller puts beside the codes.

Sums are taken by halves, as there: another order could choose another code. Full runs of a head are one launch, its shorter last one
another.

With TRITON_INTERPRET=1 when this module is imported, the same kernels run on host memory, slowly, for tests.
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from kvhold.kernels.numba_floats import KINDS
from kvhold.kernels.numba_turns import KEPT, LEVELS, RUN, SIGNS, head_bytes, turned_size
from kvhold.kernels.triton_floats import EXACT, load_floats, magnitudes_of, store_within
from kvhold.kernels.triton_launch import Tensor, check, on_device

TILE = 1024  # places of one program


def encode(elements: Tensor, dtype: str, *, head_dim: int, limit: float, codes: Tensor, scales: Tensor) -> None:
    """elements [heads * head_dim] to codes [heads, head_bytes] and scales [heads, runs], KEPT where the error would be above `limit`."""
    signs, levels, middles = _tables(elements.device)
    _launch(_encode, elements, dtype, head_dim, codes, scales, signs, levels, middles, float(np.float32(limit)))


def decode(codes: Tensor, scales: Tensor, dtype: str, *, head_dim: int, elements: Tensor) -> None:
    """The inverse, as near as the bits allow; zeros for vectors that are KEPT. Scales are finite."""
    signs, levels, _ = _tables(elements.device)
    _launch(_decode, elements, dtype, head_dim, codes, scales, signs, levels)


def _launch(
    kernel: triton.runtime.KernelInterface,
    elements: Tensor,
    dtype: str,
    head_dim: int,
    codes: Tensor,
    scales: Tensor,
    *more: Tensor | float,
) -> None:
    check(INTERPRETED, elements, codes, scales)
    full, rest = divmod(head_dim, RUN)
    heads, runs = elements.numel() // head_dim, full + (rest > 0)
    assert elements.numel() == heads * head_dim and codes.shape == (heads, head_bytes(head_dim)) and scales.shape == (heads, runs)
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float32
    for first, many, count in ((0, full, RUN), (full, 1, rest)):
        if not heads * many * count:
            continue
        size = turned_size(count)
        together = TILE // size
        with on_device(elements):
            kernel[(triton.cdiv(heads * many, together),)](
                elements,
                codes,
                scales,
                *more,
                heads * many,
                first,
                many,
                count,
                head_dim,
                codes.shape[1],
                runs,
                kind=KINDS[dtype],
                stages=size.bit_length() - 1,
                together=together,
                **EXACT,
            )


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The signs, the levels, and what lies in the middle of one positive level and the next."""
    upper = LEVELS[: LEVELS.size // 2]
    middles = (upper[:-1] + upper[1:]) * np.float32(0.5)
    return tuple(torch.from_numpy(each.copy()).to(device) for each in (SIGNS, LEVELS, middles))


_RUN, _KEPT, _LARGEST = tl.constexpr(RUN), tl.constexpr(float(KEPT)), tl.constexpr(float(np.finfo(np.float32).max))


@triton.jit
def _halves(rows):  # type: ignore[no-untyped-def]
    """The first half of each row, and the second."""
    half: tl.constexpr = rows.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(rows, (rows.shape[0], 2, half)), (0, 2, 1)))


@triton.jit
def _turn(rows, stages: tl.constexpr):  # type: ignore[no-untyped-def]
    """The Hadamard transform of each row: what is half a row apart goes beside each other, so that all is in its place after all stages."""
    for _ in tl.static_range(stages):
        first, second = _halves(rows)
        rows = tl.reshape(tl.join(first + second, first - second), (rows.shape[0], 1 << stages))
    return rows


@triton.jit
def _sum(rows, stages: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row, by halves."""
    for _ in tl.static_range(stages):
        first, second = _halves(rows)
        rows = first + second
    return tl.reshape(rows, (rows.shape[0],))


@triton.jit
def _places(count, first, many, in_vector, head_dim, row_bytes, runs, stages: tl.constexpr, together: tl.constexpr):  # type: ignore[no-untyped-def]
    """[together] which vectors there are, where their codes and scales are; [together, 2**stages] where elements are, and which there are.

    Vectors are the runs from the `first` on, `many` of each head; all runs before them are full.
    """
    index = tl.program_id(0) * together + tl.arange(0, together)
    place = tl.arange(0, 1 << stages)[None, :]
    head = index // many
    run = first + index % many
    is_vector = index < count
    i = (head * head_dim + run * _RUN)[:, None] + place
    return is_vector, head * row_bytes + run * (_RUN // 2), head * runs + run, i, is_vector[:, None] & (place < in_vector)


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    elements,
    codes,
    scales,
    signs,
    levels,
    middles,
    limit,
    count,
    first,
    many,
    in_vector,
    head_dim,
    row_bytes,
    runs,
    kind: tl.constexpr,
    stages: tl.constexpr,
    together: tl.constexpr,
):
    """Grid [vectors / together]. A vector whose largest is a denormal is not coded: it is zeros, or KEPT."""
    size: tl.constexpr = 1 << stages
    is_vector, code_at, scale_at, i, mask = _places(count, first, many, in_vector, head_dim, row_bytes, runs, stages, together)
    values = load_floats(elements + i, mask, kind)
    sign = tl.load(signs + tl.arange(0, size))[None, :]
    most = tl.reduce(magnitudes_of(values), 1, tl.standard._elementwise_max)
    exponent = tl.minimum(most >> 23, 253)
    up = (254 - exponent << 23).to(tl.float32, bitcast=True)
    down = (exponent << 23).to(tl.float32, bitcast=True)
    turned = _turn(tl.where(mask, values * up[:, None] * sign, 0.0), stages)

    mean = tl.where(exponent > 0, _sum(turned * turned, stages) * (1 / size), 1.0)
    inverse = tl.div_rn(tl.full((together,), 1.0, tl.float32), tl.sqrt_rn(mean))
    places = turned * inverse[:, None]
    code = tl.where(places < 0, 8, 0)
    for lower in tl.static_range(7):
        code += (tl.abs(places) > tl.load(middles + lower)).to(tl.int32)

    # The scale that leaves the least error, and the error that it leaves.
    level = tl.load(levels + code)
    scale = tl.div_rn(_sum(turned * level, stages), _sum(level * level, stages)) * (1 / size) * down
    apart = _turn(level, stages) * scale[:, None] * sign - values
    worst = tl.reduce(tl.where(mask, magnitudes_of(apart), 0), 1, tl.standard._elementwise_max)
    is_coded = (exponent > 0) & (worst.to(tl.float32, bitcast=True) <= limit) & (scale <= _LARGEST)
    is_zero = (exponent == 0) & (most.to(tl.float32, bitcast=True) <= limit)
    tl.store(scales + scale_at, tl.where(is_coded, scale, tl.where(is_zero, 0.0, _KEPT)), mask=is_vector)
    if size == 1:
        packed = code
    else:
        low, high = _halves(code)
        packed = low | high << 4
    byte = tl.arange(0, (size + 1) // 2)[None, :]
    tl.store(codes + code_at[:, None] + byte, tl.where(is_coded[:, None], packed, 0).to(tl.uint8), mask=is_vector[:, None])


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    elements,
    codes,
    scales,
    signs,
    levels,
    count,
    first,
    many,
    in_vector,
    head_dim,
    row_bytes,
    runs,
    kind: tl.constexpr,
    stages: tl.constexpr,
    together: tl.constexpr,
):
    """Grid [vectors / together]."""
    size: tl.constexpr = 1 << stages
    half: tl.constexpr = (size + 1) // 2
    is_vector, code_at, scale_at, i, mask = _places(count, first, many, in_vector, head_dim, row_bytes, runs, stages, together)
    place = tl.arange(0, size)[None, :]
    packed = tl.load(codes + code_at[:, None] + place % half, mask=is_vector[:, None], other=0).to(tl.int32)
    level = tl.load(levels + (packed >> place // half * 4 & 15))
    scale = tl.load(scales + scale_at, mask=is_vector, other=0)
    scale = tl.where(scale > 0, scale, 0.0)
    values = _turn(level, stages) * scale[:, None] * tl.load(signs + place)
    store_within(elements + i, values, mask, kind)


INTERPRETED = not isinstance(_decode, triton.runtime.JITFunction)
