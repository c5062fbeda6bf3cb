"""Numbers into 4 or 2 bits and back on a GPU: what numba_groups.py does, with the same ends, codes and values, bit by bit.

    columns_encode(elements, "bfloat16", bits=4, ends=ends, codes=codes)                 # a group is 32 tokens of a channel
    rows_encode(elements, "bfloat16", head_dim=128, bits=4, ends=ends, codes=codes)      # a group is 32 channels of a head, in a token

For who has the KV on a device: an engine's worker, or a tier of GPU memory, that encodes before bytes cross the bus, or decodes after. The
node never touches a device and uses the numba kernels. Arguments are contiguous torch tensors of one device, of the shapes and types that
the numba functions have, and numbers are finite, as there; planes of full groups, end to end, may share a call. Nothing waits for the
current stream.

Bytes hold codes of columns that are far apart, of other groups each, so an encoder finds all ends first and then looks them up, byte by
byte; a decoder does the same look-up. Least and largest are found as integers, which order -0 before 0 on every processor.

With TRITON_INTERPRET=1 when this module is imported, the same kernels run on host memory, slowly, for tests.
"""

import torch
import triton
import triton.language as tl

from kvhold.kernels.numba_floats import KINDS
from kvhold.kernels.numba_groups import GROUP, num_groups, packed_width
from kvhold.kernels.triton_floats import EXACT, load_floats, nearest, store_floats, store_within
from kvhold.kernels.triton_launch import Tensor, check, on_device

COLUMNS = 64  # ends, or bytes of codes, side by side in one program


def columns_encode(elements: Tensor, dtype: str, *, bits: int, ends: Tensor, codes: Tensor) -> None:
    """elements [n * GROUP, width] to ends [n, 2, width], the least and the largest of each group, and codes [n * GROUP, packed_width]."""
    _check_columns(elements, bits, ends, codes)
    _encode(elements, dtype, None, bits, ends, codes)


def columns_decode(codes: Tensor, ends: Tensor, dtype: str, *, bits: int, elements: Tensor) -> None:
    """The inverse, as near as the bits allow."""
    _check_columns(elements, bits, ends, codes)
    _by_bytes(_values, elements, dtype, None, bits, ends, codes)


def rows_encode(elements: Tensor, dtype: str, *, head_dim: int, bits: int, ends: Tensor, codes: Tensor) -> None:
    """elements [tokens, width] to ends [tokens, 2, num_groups], least and largest of each group, and codes [tokens, packed_width]."""
    _check_rows(elements, head_dim, bits, ends, codes)
    _encode(elements, dtype, head_dim, bits, ends, codes)


def rows_decode(codes: Tensor, ends: Tensor, dtype: str, *, head_dim: int, bits: int, elements: Tensor) -> None:
    """The inverse, as near as the bits allow."""
    _check_rows(elements, head_dim, bits, ends, codes)
    _by_bytes(_values, elements, dtype, head_dim, bits, ends, codes)


def _check_columns(elements: Tensor, bits: int, ends: Tensor, codes: Tensor) -> None:
    groups, two, width = ends.shape
    assert two == 2 and elements.shape == (groups * GROUP, width)
    _check(elements, bits, ends, codes)


def _check_rows(elements: Tensor, head_dim: int, bits: int, ends: Tensor, codes: Tensor) -> None:
    tokens, width = elements.shape
    assert width % head_dim == 0 and ends.shape == (tokens, 2, num_groups(width, head_dim))
    _check(elements, bits, ends, codes)


def _check(elements: Tensor, bits: int, ends: Tensor, codes: Tensor) -> None:
    check(INTERPRETED, elements, ends, codes)
    tokens, width = elements.shape
    assert bits in (2, 4) and width >= 1 and elements.dtype == ends.dtype
    assert codes.shape == (tokens, packed_width(width, bits)) and codes.dtype == torch.uint8


def _encode(elements: Tensor, dtype: str, head_dim: int | None, bits: int, ends: Tensor, codes: Tensor) -> None:
    """head_dim: None where a group is of one column."""
    rows, _, per_row = ends.shape
    if not elements.numel():
        return
    columns = min(COLUMNS, triton.next_power_of_2(per_row))
    with on_device(elements):
        _ends[(rows, triton.cdiv(per_row, columns))](
            elements,
            ends,
            elements.shape[1],
            per_row,
            *_of_heads(head_dim),
            in_columns=head_dim is None,
            kind=KINDS[dtype],
            columns=columns,
            **EXACT,
        )
    _by_bytes(_codes, elements, dtype, head_dim, bits, ends, codes)


def _by_bytes(
    kernel: triton.runtime.KernelInterface, elements: Tensor, dtype: str, head_dim: int | None, bits: int, ends: Tensor, codes: Tensor
) -> None:
    tokens, row_bytes = codes.shape
    if not elements.numel():
        return
    columns = min(COLUMNS, triton.next_power_of_2(row_bytes))
    with on_device(elements):
        kernel[(triton.cdiv(tokens, GROUP), triton.cdiv(row_bytes, columns))](
            elements,
            ends,
            codes,
            tokens,
            elements.shape[1],
            row_bytes,
            ends.shape[2],
            *_of_heads(head_dim),
            bits=bits,
            in_columns=head_dim is None,
            kind=KINDS[dtype],
            columns=columns,
            **EXACT,
        )


def _of_heads(head_dim: int | None) -> tuple[int, int]:
    """Channels and groups of a head."""
    return (1, 1) if head_dim is None else (head_dim, num_groups(head_dim, head_dim))


_GROUP = tl.constexpr(GROUP)
_LEAST = tl.constexpr(2.0**-120)  # of half a range: the inverse of what is smaller may overflow, and all of such a group becomes its least
_FIRST, _LAST = tl.constexpr(0x7FFF_FFFF), tl.constexpr(-0x8000_0000)


@triton.jit
def _turned_about(bits):  # type: ignore[no-untyped-def]
    """int32 bits of numbers to int32 in the order of the numbers, -0 before 0; and back."""
    return bits ^ (bits >> 31 & 0x7FFF_FFFF)


@triton.jit
def _ends(  # type: ignore[no-untyped-def]
    elements,
    ends,
    width,
    per_row,
    head_dim,
    groups_of_head,
    in_columns: tl.constexpr,
    kind: tl.constexpr,
    columns: tl.constexpr,
):
    """Grid [rows of ends, ends of a row / columns]."""
    row = tl.program_id(0)
    group = tl.program_id(1) * columns + tl.arange(0, columns)
    member = tl.arange(0, _GROUP)[None, :]
    is_group = group < per_row
    if in_columns:
        i = (row * _GROUP + member) * width + group[:, None]
        mask = is_group[:, None] & (member < _GROUP)
    else:
        begin = (group % groups_of_head * _GROUP)[:, None]
        i = (row * width + group // groups_of_head * head_dim)[:, None] + begin + member
        mask = is_group[:, None] & (begin + member < head_dim)
    ranks = _turned_about(load_floats(elements + i, mask, kind).to(tl.int32, bitcast=True))
    least = tl.reduce(tl.where(mask, ranks, _FIRST), 1, tl.standard._elementwise_min)
    largest = tl.reduce(tl.where(mask, ranks, _LAST), 1, tl.standard._elementwise_max)
    into = ends + 2 * per_row * row + group
    store_floats(into, _turned_about(least).to(tl.float32, bitcast=True), is_group, kind)
    store_floats(into + per_row, _turned_about(largest).to(tl.float32, bitcast=True), is_group, kind)


@triton.jit
def _bytes(tokens, row_bytes, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the program's tile: [GROUP] tokens, [columns] bytes of their rows; [GROUP, columns] where these are, and which there are."""
    token = tl.program_id(0) * _GROUP + tl.arange(0, _GROUP)
    byte = tl.program_id(1) * columns + tl.arange(0, columns)
    return token, byte, token[:, None] * row_bytes + byte[None, :], (token < tokens)[:, None] & (byte < row_bytes)[None, :]


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    part: tl.constexpr,
    ends,
    token,
    byte,
    tokens,
    width,
    row_bytes,
    per_row,
    head_dim,
    groups_of_head,
    in_columns: tl.constexpr,
    kind: tl.constexpr,
):
    """Of the elements whose codes are in this part of each byte: where they are, which there are, and the ends of their groups."""
    column = (part * row_bytes + byte)[None, :]
    is_column = (byte < row_bytes)[None, :] & (column < width)
    mask = (token < tokens)[:, None] & is_column
    if in_columns:
        at = 2 * per_row * tl.program_id(0) + column
        is_end = is_column
    else:
        at = 2 * per_row * token[:, None] + column // head_dim * groups_of_head + column % head_dim // _GROUP
        is_end = mask
    least = load_floats(ends + at, is_end, kind)
    largest = load_floats(ends + at + per_row, is_end, kind)
    return token[:, None] * width + column, mask, least, largest


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    elements,
    ends,
    codes,
    tokens,
    width,
    row_bytes,
    per_row,
    head_dim,
    groups_of_head,
    bits: tl.constexpr,
    in_columns: tl.constexpr,
    kind: tl.constexpr,
    columns: tl.constexpr,
):
    """Grid [tokens / GROUP, row_bytes / columns]. Bits beyond a row's last element are 0."""
    steps: tl.constexpr = (1 << bits) - 1
    token, byte, at, is_byte = _bytes(tokens, row_bytes, columns)
    packed = tl.full((_GROUP, columns), 0, tl.int32)
    for part in tl.static_range(8 // bits):
        i, mask, least, largest = _part(
            part, ends, token, byte, tokens, width, row_bytes, per_row, head_dim, groups_of_head, in_columns, kind
        )
        low = least * 0.5
        half = largest * 0.5 - low
        is_range = half >= _LEAST
        inverse = tl.where(is_range, tl.div_rn(tl.full(half.shape, steps, tl.float32), tl.where(is_range, half, 1.0)), 0.0)
        packed |= nearest((load_floats(elements + i, mask, kind) * 0.5 - low) * inverse) << bits * part
    tl.store(codes + at, packed.to(tl.uint8), mask=is_byte)


@triton.jit
def _values(  # type: ignore[no-untyped-def]
    elements,
    ends,
    codes,
    tokens,
    width,
    row_bytes,
    per_row,
    head_dim,
    groups_of_head,
    bits: tl.constexpr,
    in_columns: tl.constexpr,
    kind: tl.constexpr,
    columns: tl.constexpr,
):
    """Grid [tokens / GROUP, row_bytes / columns]. `steps` times float32(1 / steps) is 1 exactly, so both ends come out as they are."""
    steps: tl.constexpr = (1 << bits) - 1
    share: tl.constexpr = 1 / steps
    token, byte, at, is_byte = _bytes(tokens, row_bytes, columns)
    packed = tl.load(codes + at, mask=is_byte, other=0).to(tl.int32)
    for part in tl.static_range(8 // bits):
        i, mask, least, largest = _part(
            part, ends, token, byte, tokens, width, row_bytes, per_row, head_dim, groups_of_head, in_columns, kind
        )
        number = (packed >> bits * part & steps).to(tl.float32)
        values = least * ((steps - number) * share) + largest * (number * share)
        store_within(elements + i, values, mask, kind)


INTERPRETED = not isinstance(_values, triton.runtime.JITFunction)
