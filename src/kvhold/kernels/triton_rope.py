"""As `reference_rope.py`, on a GPU, on the current stream."""

from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from kvhold.kernels.rope import Rope
from kvhold.kernels.rotary import Rotations
from kvhold.kernels.triton_floats import EXACT, load_floats

_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_TILE_PAIRS = 1024


def rotate(keys: Any, rotations: Rotations, rope: Rope, out: Any) -> None:
    device = str(keys.device)
    if device == "cpu" and not INTERPRETED:
        raise ValueError("the triton worker turns host memory only under TRITON_INTERPRET=1")
    if out is not keys:
        for rest in (slice(0, rope.first), slice(rope.first + rope.rotary_dim, None)):
            out[..., rest] = keys[..., rest]
    cos, sin = rotations.on(device)
    bits = torch.int32 if keys.itemsize == 4 else torch.int16
    source, into = keys.detach().view(bits), out.detach().view(bits)
    with nullcontext() if device == "cpu" else torch.cuda.device(device):
        for at in product(*map(range, keys.shape[:-3])):
            _launch(source[at], into[at], cos, sin, rope, kind=_KINDS[keys.dtype])


def _launch(keys: Any, out: Any, cos: Any, sin: Any, rope: Rope, *, kind: int) -> None:
    """[tokens, heads, head_dim], as bits"""
    tokens, heads, _ = keys.shape
    if not keys.numel():
        return
    num_pairs = rope.rotary_dim // 2
    width = triton.next_power_of_2(num_pairs)
    rows = max(1, _TILE_PAIRS // width)
    is_half = rope.layout == "half"
    _turn_rows[(triton.cdiv(tokens * heads, rows),)](
        keys,
        out,
        cos,
        sin,
        tokens * heads,
        heads,
        num_pairs,
        rope.first,
        num_pairs if is_half else 1,
        *keys.stride(),
        *out.stride(),
        pair_elements=1 if is_half else 2,
        kind=kind,
        rows=rows,
        width=width,
        **EXACT,
    )


@triton.jit
def _store(at, values, mask, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round to nearest even."""
    if kind == 0:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        tl.store(at, rounded.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    elif kind == 1:
        tl.store(at, values.to(tl.float16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(at, values.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _turn_rows(  # type: ignore[no-untyped-def]  # Triton reads annotations itself and knows few
    keys,
    out,
    cos,
    sin,
    num_rows,
    heads,
    num_pairs,
    first,
    apart,
    token_stride,
    head_stride,
    stride,
    out_token_stride,
    out_head_stride,
    out_stride,
    pair_elements: tl.constexpr,
    kind: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """A row is one head of one token. A program reads its rows before it writes them.

    apart: elements from a pair's first to its second
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    pair = tl.arange(0, width)[None, :]
    mask = (row < num_rows) & (pair < num_pairs)
    token, head = (row // heads).to(tl.int64), row % heads
    element = first + pair * pair_elements
    at = keys + token * token_stride + head * head_stride + element * stride
    to = out + token * out_token_stride + head * out_head_stride + element * out_stride
    c = tl.load(cos + token * num_pairs + pair, mask=mask, other=0.0)
    s = tl.load(sin + token * num_pairs + pair, mask=mask, other=0.0)
    x, y = load_floats(at, mask, kind), load_floats(at + apart * stride, mask, kind)
    _store(to, x * c - y * s, mask, kind)
    _store(to + apart * out_stride, y * c + x * s, mask, kind)


INTERPRETED = not isinstance(_turn_rows, triton.runtime.JITFunction)
