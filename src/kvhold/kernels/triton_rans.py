"""Bytes into planes and planes into fewer bytes on a GPU: what numba_rans.py does, with the same words and the same refusals.

    planes = split(elements)                                   # uint8 [bytes of an element, n]
    words, counts = encode(planes, freq)                       # one plane [n], or as many as share a launch [planes, n]
    intact = decode(words, counts, freq, found)                # False: no encoder can have written this
    merge(found, bias, elements)

For who has the KV on a device: an engine's worker, or a tier of GPU memory, that encodes before bytes cross the bus, or decodes after. The
node never touches a device and uses the numba kernels. Arguments are contiguous torch tensors of one device; the current stream does the
work, and `encode` and `decode` wait for it, as they answer with sizes and a verdict.

A program is one warp and codes one segment: a lane has a state, and its place in the segment's row of words is a prefix sum over the lanes
before it that want one too. Segments are independent of each other, so many planes at once are what fills a GPU. States are exact
in 32 unsigned bits. Every read of words is masked by the segment's end: what no encoder wrote is refused, and nothing else is read.

With TRITON_INTERPRET=1 when this module is imported, the same kernels run on host memory, slowly, for tests.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvhold.kernels.numba_rans import LANES, SCALE, SCALE_BITS, SEGMENT, STATE_WORDS
from kvhold.kernels.triton_launch import Tensor, check, on_device

TILE = 1024  # elements of one program where each is by itself


def split(elements: Tensor) -> Tensor:
    """uint8 [bytes of an element, n], most significant plane first, of `elements` [n], unsigned integers."""
    check(INTERPRETED, elements)
    planes = torch.empty((elements.itemsize, elements.numel()), dtype=torch.uint8, device=elements.device)
    if elements.numel():
        with on_device(elements):
            _split[_tiles(elements.numel())](elements, planes, elements.numel(), size=elements.itemsize, tile=TILE)
    return planes


def merge(planes: Sequence[Tensor] | Tensor, bias: Tensor | None, out: Tensor) -> None:
    """What `split` took apart; `bias` uint8 [width] is added to plane 0, over and over, modulo 256 (width divides n)."""
    check(INTERPRETED, out, bias, *planes)
    assert len(planes) == out.itemsize and all(plane.numel() == out.numel() for plane in planes)
    assert bias is None or out.numel() % bias.numel() == 0
    if not out.numel():
        return
    rest = planes[1] if len(planes) == 2 else torch.stack(tuple(planes[1:])) if len(planes) > 2 else planes[0]
    width = 0 if bias is None else bias.numel()
    with on_device(out):
        _merge[_tiles(out.numel())](
            planes[0], rest, out if bias is None else bias, out, out.numel(), max(width, 1), biased=width > 0, size=out.itemsize, tile=TILE
        )


def histogram(plane: Tensor) -> Tensor:
    """int64 [256] how often each byte occurs, or [planes, 256] of `plane` [planes, n]."""
    check(INTERPRETED, plane)
    rows = plane if plane.ndim == 2 else plane[None]
    counts = torch.zeros((rows.shape[0], 256), dtype=torch.int64, device=plane.device)
    if rows.numel():
        with on_device(plane):
            _histogram[(*_tiles(rows.shape[1]), rows.shape[0])](rows, counts, rows.shape[1], tile=TILE)
    return counts if plane.ndim == 2 else counts[0]


def channel_sums(plane: Tensor, width: int) -> Tensor:
    """int64 [width] the sum of each column of `plane` as [n / width, width]."""
    check(INTERPRETED, plane)
    assert plane.numel() % width == 0
    return plane.view(-1, width).sum(dim=0, dtype=torch.int64)


def encode(plane: Tensor, freq: Tensor, *, segment_size: int = SEGMENT) -> tuple[Tensor, Tensor]:
    """All segments end to end as uint16, and int64 [segments] the words of each. Every byte of the plane has a frequency below SCALE.

    plane:        uint8 [n] with freq int64 [256], or [planes, n] with [planes, 256]; segments of all planes are end to end then
    segment_size: symbols; another size is for tests
    """
    rows = plane if plane.ndim == 2 else plane[None]
    tables = freq if freq.ndim == 2 else freq[None]
    assert tables.shape == (rows.shape[0], 256)
    return encode_segments(rows, None, tables, width=segment_size, segment_size=segment_size, scale_bits=SCALE_BITS)


def decode(words: Tensor, counts: Tensor, freq: Tensor, out: Tensor, *, segment_size: int = SEGMENT) -> bool:
    """Fill `out` from all segments. False if any does not end as an encoder ends it; `out` then holds anything.

    words, counts: as `encode` gives them; counts of sum `words.numel()`, each at least STATE_WORDS (asserted)
    freq:          int64 [256] of sum SCALE, none negative (asserted), or [planes, 256] for `out` [planes, n]
    """
    rows = out if out.ndim == 2 else out[None]
    tables = freq if freq.ndim == 2 else freq[None]
    assert tables.shape == (rows.shape[0], 256)
    assert bool((tables.sum(dim=1) == SCALE).all()) and bool((tables >= 0).all())
    return decode_segments(words, counts, None, tables, rows, width=segment_size, segment_size=segment_size, scale_bits=SCALE_BITS)


def encode_segments(
    symbols: Tensor, kinds: Tensor | None, freq: Tensor, *, width: int, segment_size: int, scale_bits: int
) -> tuple[Tensor, Tensor]:
    """As `encode`, for symbols [planes, n] in rows of `width`, a symbol's lane being its column modulo LANES.

    kinds: uint8 [planes, n], or None: which row of freq [planes * kinds, 256] a symbol is coded with, of its plane's
    """
    check(INTERPRETED, symbols, kinds, freq)
    planes, size = symbols.shape
    segments = -(-size // segment_size)
    row_words = min(segment_size, size) + STATE_WORDS
    scratch = torch.empty((planes * segments, row_words), dtype=torch.uint16, device=symbols.device)
    counts = torch.zeros(planes * segments, dtype=torch.int64, device=symbols.device)
    if not planes * segments:
        return scratch.view(-1), counts
    ranges = (freq << 16 | (freq.cumsum(dim=1) - freq)).to(torch.int32)
    with on_device(symbols):
        _encode[(segments, planes)](
            symbols,
            symbols if kinds is None else kinds,
            ranges,
            scratch,
            counts,
            size,
            width,
            segment_size,
            row_words,
            freq.shape[0] // planes,
            has_kinds=kinds is not None,
            scale_bits=scale_bits,
            lanes=LANES,
            num_warps=1,
        )
        ends = counts.cumsum(dim=0)
        words = torch.empty(int(ends[-1]), dtype=torch.uint16, device=symbols.device)
        _gather[(planes * segments, triton.cdiv(row_words, TILE))](scratch, counts, ends, words, row_words, tile=TILE)
    return words, counts


def decode_segments(
    words: Tensor,
    counts: Tensor,
    kinds: Tensor | None,
    freq: Tensor,
    out: Tensor,
    *,
    width: int,
    segment_size: int,
    scale_bits: int,
) -> bool:
    """As `decode`, for rows and kinds as `encode_segments` has them."""
    check(INTERPRETED, words, counts, kinds, freq, out)
    planes, size = out.shape
    segments = -(-size // segment_size)
    assert words.dtype == torch.uint16 and counts.numel() == planes * segments
    ends = counts.cumsum(dim=0)
    assert (int(ends[-1]) if counts.numel() else 0) == words.numel()
    assert not counts.numel() or int(counts.min()) >= STATE_WORDS
    if not counts.numel():
        return True
    intact = torch.zeros(planes * segments, dtype=torch.int32, device=out.device)
    with on_device(out):
        _decode[(segments, planes)](
            words,
            counts,
            ends,
            out if kinds is None else kinds,
            _tables(freq, scale_bits),
            out,
            intact,
            size,
            width,
            segment_size,
            freq.shape[0] // planes,
            has_kinds=kinds is not None,
            scale_bits=scale_bits,
            lanes=LANES,
            num_warps=1,
        )
    return bool(intact.all())


def _tables(freq: Tensor, scale_bits: int) -> Tensor:
    """int32 [rows, 2**scale_bits] for each slot its symbol (8 bits), the symbol's frequency less one and the place within."""
    ends = freq.cumsum(dim=1)
    slots = torch.arange(1 << scale_bits, device=freq.device).expand(freq.shape[0], -1).contiguous()
    symbols = torch.searchsorted(ends, slots, right=True)
    often = freq.gather(1, symbols)
    within = slots - (ends.gather(1, symbols) - often)
    return (symbols | (often - 1) << 8 | within << (8 + scale_bits)).to(torch.int32)  # its low 32 bits


def _tiles(size: int) -> tuple[int]:
    return (triton.cdiv(size, TILE),)


@triton.jit
def _split(elements, planes, count, size: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [tiles]."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = i < count
    x = tl.load(elements + i, mask=mask, other=0).to(tl.uint64)
    x = x << 1 | x >> (8 * size - 1)  # bits beyond the element are cut off below
    for plane in tl.static_range(size):
        into = planes + tl.full((), plane, tl.int64) * count + i
        tl.store(into, (x >> (8 * (size - 1 - plane)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    first, rest, bias, out, count, width, biased: tl.constexpr, size: tl.constexpr, tile: tl.constexpr
):
    """Grid [tiles]; `rest` are the planes from the second on, end to end."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = i < count
    x = tl.load(first + i, mask=mask, other=0).to(tl.uint64)
    if biased:
        x = x + tl.load(bias + i % width, mask=mask, other=0).to(tl.uint64) & 255
    for plane in tl.static_range(size - 1):
        x = x << 8 | tl.load(rest + tl.full((), plane, tl.int64) * count + i, mask=mask, other=0).to(tl.uint64)
    x = x >> 1 | (x & 1) << (8 * size - 1)
    tl.store(out + i, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _histogram(rows, counts, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [tiles, rows]."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    values = tl.load(rows + row * count + i, mask=i < count, other=0).to(tl.int32)
    value = tl.arange(0, 256)
    beyond = tl.maximum((tl.program_id(0) + 1) * tile - count, 0)  # they were counted as zeros
    found = tl.histogram(values, 256) - tl.where(value == 0, beyond, 0)
    tl.atomic_add(counts + row * 256 + value, found.to(tl.int64), mask=found > 0)


@triton.jit
def _segment(size, width, segment_size, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the program's segment: its plane, its number among those of all planes, where it begins, its symbols, and the steps they take."""
    plane = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * segment_size
    count = tl.minimum(segment_size, size - first).to(tl.int32)
    steps = count // width * ((width + lanes - 1) // lanes) + (count % width + lanes - 1) // lanes
    return plane, plane * tl.num_programs(0) + tl.program_id(0), plane * size + first, count, steps


@triton.jit
def _at_step(step, kinds, count, width, first_table, has_kinds: tl.constexpr, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each lane: where its symbol is in the segment, whether it has one, and the table it is coded with."""
    blocks = (width + lanes - 1) // lanes
    column = step % blocks * lanes + tl.arange(0, lanes)
    i = step // blocks * width + column
    active = (column < width) & (i < count)
    table = first_table
    if has_kinds:
        table += tl.load(kinds + i, mask=active, other=0).to(tl.int64)
    return i, active, table


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    symbols,
    kinds,
    ranges,
    scratch,
    counts,
    size,
    width,
    segment_size,
    row_words,
    num_kinds,
    has_kinds: tl.constexpr,
    scale_bits: tl.constexpr,
    lanes: tl.constexpr,
):
    """Grid [segments, planes], a warp each. The segment's words end where its row of `scratch` ends; they are filled in from there."""
    plane, segment, begin, count, steps = _segment(size, width, segment_size, lanes)
    row = scratch + segment * row_words
    lane = tl.arange(0, lanes)
    x = tl.full((lanes,), 1 << 16, tl.uint32)
    at = row_words.to(tl.int32)
    for done in range(steps):
        i, active, table = _at_step(steps - 1 - done, kinds + begin, count, width, plane * num_kinds, has_kinds, lanes)
        symbol = tl.load(symbols + begin + i, mask=active, other=0).to(tl.int64)
        entry = tl.load(ranges + table * 256 + symbol, mask=active, other=1 << 16).to(tl.uint32, bitcast=True)
        often = entry >> 16
        full = active & (x >> (32 - scale_bits) >= often)
        ones = full.to(tl.int32)
        place = tl.associative_scan(ones, 0, tl.standard._sum_combine) - ones
        at -= tl.reduce(ones, 0, tl.standard._sum_combine)
        tl.store(row + at + place, (x & 0xFFFF).to(tl.uint16), mask=full)
        left = tl.where(full, x >> 16, x)
        q = left // tl.maximum(often, 1)
        x = tl.where(active, (q << scale_bits) + (left - q * often) + (entry & 0xFFFF), x)
    at -= 2 * lanes
    tl.store(row + at + 2 * lane, (x & 0xFFFF).to(tl.uint16))
    tl.store(row + at + 2 * lane + 1, (x >> 16).to(tl.uint16))
    tl.store(counts + segment, (row_words - at).to(tl.int64))


@triton.jit
def _gather(scratch, counts, ends, words, row_words, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [segments, tiles]; the ends of all rows, end to end."""
    segment = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + segment)
    i = tl.program_id(1) * tile + tl.arange(0, tile)
    found = tl.load(scratch + (segment + 1) * row_words - count + i, mask=i < count, other=0)
    tl.store(words + tl.load(ends + segment) - count + i, found, mask=i < count)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    words,
    counts,
    ends,
    kinds,
    tables,
    out,
    intact,
    size,
    width,
    segment_size,
    num_kinds,
    has_kinds: tl.constexpr,
    scale_bits: tl.constexpr,
    lanes: tl.constexpr,
):
    """Grid [segments, planes], a warp each. `taken` goes on beyond `left` if words are missing, so that it cannot equal it at the end."""
    plane, segment, begin, count, steps = _segment(size, width, segment_size, lanes)
    in_segment = tl.load(counts + segment)
    states = words + (tl.load(ends + segment) - in_segment)
    row = states + 2 * lanes
    left = (in_segment - 2 * lanes).to(tl.int32)
    lane = tl.arange(0, lanes)
    x = tl.load(states + 2 * lane).to(tl.uint32) | tl.load(states + 2 * lane + 1).to(tl.uint32) << 16
    taken = left - left
    for step in range(steps):
        i, active, table = _at_step(step, kinds + begin, count, width, plane * num_kinds, has_kinds, lanes)
        slot = (x & ((1 << scale_bits) - 1)).to(tl.int64)
        entry = tl.load(tables + (table << scale_bits) + slot).to(tl.uint32, bitcast=True)
        tl.store(out + begin + i, (entry & 255).to(tl.uint8), mask=active)
        often = (entry >> 8 & ((1 << scale_bits) - 1)) + 1
        moved = often * (x >> scale_bits) + (entry >> (8 + scale_bits))
        wanted = active & (moved < 1 << 16)
        ones = wanted.to(tl.int32)
        place = taken + tl.associative_scan(ones, 0, tl.standard._sum_combine) - ones
        word = tl.load(row + place, mask=wanted & (place < left), other=0).to(tl.uint32)
        x = tl.where(active, tl.where(wanted, moved << 16 | word, moved), x)
        taken += tl.reduce(ones, 0, tl.standard._sum_combine)
    wrong = tl.reduce((x != 1 << 16).to(tl.int32), 0, tl.standard._sum_combine)
    tl.store(intact + segment, ((taken == left) & (wrong == 0)).to(tl.int32))


INTERPRETED = not isinstance(_decode, triton.runtime.JITFunction)
