"""Byte planes coded with interleaved rANS (Duda 2013, Giesen 2014; docs/format.md).

Symbol i of a segment belongs to lane i % LANES: a 32-bit state in [2**16, 2**32). Frequencies sum
to 2**12, so a symbol costs at most one 16-bit word. `words` is not trusted.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvhold.kernels.numba_compile import compiled, readonly

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint16]
Counts: TypeAlias = npt.NDArray[np.int64]
Elements: TypeAlias = npt.NDArray[Any]  # uint8, uint16, uint32 or uint64

LANES = 32
SEGMENT = 1 << 15
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
STATE_WORDS = 2 * LANES


def split(elements: Elements) -> Bytes:
    """[n] -> byte planes, uint8 [bytes of an element, n]."""
    planes = np.empty((elements.itemsize, elements.size), np.uint8)
    _split(elements, planes)
    return planes


def merge(planes: Sequence[Bytes], bias: Bytes | None, out: Elements) -> None:
    """Undo `split`. bias: [width], added to each row of plane 0, modulo 256."""
    assert len(planes) == out.itemsize and all(plane.size == out.size for plane in planes)
    assert bias is None or out.size % bias.size == 0
    if bias is None:
        bias = _NO_BIAS
    if len(planes) == 1:
        _merge1(planes[0], bias, out)
    elif len(planes) == 2:
        _merge2(planes[0], planes[1], bias, out)
    elif len(planes) == 4:
        _merge4(planes[0], planes[1], planes[2], planes[3], bias, out)
    else:
        _merge(np.stack(planes), bias, out)


def histogram(plane: Bytes) -> Counts:
    counts = np.zeros(256, np.int64)
    _histogram(plane, counts)
    return counts


def channel_sums(plane: Bytes, width: int) -> Counts:
    """As [n / width, width]."""
    assert plane.size % width == 0
    sums = np.zeros(width, np.int64)
    _channel_sums(plane, sums)
    return sums


def frequencies(counts: Counts) -> Counts:
    """Scale `counts` to the sum SCALE. At least two bytes must occur."""
    present = np.flatnonzero(counts)
    assert present.size >= 2
    total = int(counts.sum())
    freq = np.zeros(256, np.int64)
    share, rest = np.divmod(counts[present] * SCALE, total)
    freq[present] = np.maximum(1, share)
    missing = SCALE - int(freq.sum())
    if missing > 0:
        freq[present[np.argsort(-rest * (share > 0), kind="stable")[:missing]]] += 1
    while missing < 0:
        most = int(freq.argmax())
        taken = min(-missing, int(freq[most]) // 2)
        freq[most] -= taken
        missing += taken
    return freq


def num_segments(symbols: int) -> int:
    return -(-symbols // SEGMENT)


def encode(plane: Bytes, freq: Counts) -> tuple[Words, Counts]:
    """All words, and the words per segment, int64 [segments].

    Frequencies of bytes that occur must be from 1 to SCALE - 1.
    """
    words = np.empty(plane.size + num_segments(plane.size) * STATE_WORDS, np.uint16)
    counts = np.zeros(num_segments(plane.size), np.int64)
    used = _encode(plane, freq, words, counts)
    return words[:used], counts


def decode(
    words: Words, counts: Counts, freq: Counts, out: Bytes, *, wide: bool | None = None
) -> bool:
    """False, with `out` undefined: segments do not end correctly.

    counts: int64 [segments], each at least STATE_WORDS
    freq:   int64 [256], of sum SCALE
    """
    assert (
        counts.size == num_segments(out.size)
        and int(counts.sum()) == words.size
        and int(counts.min(initial=STATE_WORDS)) >= STATE_WORDS
    )
    assert freq.size == 256 and int(freq.sum()) == SCALE and int(freq.min()) >= 0
    return bool(_decode(words, counts, freq, WIDE if wide is None else wide, out))


_NO_BIAS: Bytes = np.zeros(0, np.uint8)
_LOW = 1 << 16

_u1 = np.uint64(1)
_u8 = np.uint64(8)
_u12 = np.uint64(12)
_u16 = np.uint64(16)
_u20 = np.uint64(20)
_u44 = np.uint64(44)
_SLOT_MASK = np.uint64(SCALE - 1)
_BYTE_MASK = np.uint64(255)
_WORD_MASK = np.uint64(0xFFFF)
_LIMIT = np.uint64(_LOW)


_UINTS = (types.uint8, types.uint16, types.uint32, types.uint64)
_bytes = readonly(types.uint8)


@compiled(*(types.void(readonly(kind), types.uint8[:, ::1]) for kind in _UINTS))
def _split(elements: Any, planes: Any) -> None:
    size = planes.shape[0]
    top = np.uint64(8 * size - 1)
    for plane in range(size):
        shift = np.uint64(8 * (size - 1 - plane))
        for i in range(elements.size):
            x = np.uint64(elements[i])
            planes[plane, i] = np.uint8((x << _u1 | x >> top) >> shift & _BYTE_MASK)


@compiled(types.void(_bytes, _bytes, types.uint8[::1]))
def _merge1(high: Any, bias: Any, out: Any) -> None:
    width = bias.size if bias.size else out.size
    for row in range(0, out.size, width):
        row_high, row_out = (
            high[row : row + width],
            out[row : row + width],
        )
        if bias.size:
            for i in range(width):
                x = np.uint8(row_high[i] + bias[i])
                row_out[i] = np.uint8(x >> 1 | (x & 1) << 7)
        else:
            for i in range(width):
                x = row_high[i]
                row_out[i] = np.uint8(x >> 1 | (x & 1) << 7)


@compiled(types.void(_bytes, _bytes, _bytes, types.uint16[::1]))
def _merge2(high: Any, low: Any, bias: Any, out: Any) -> None:
    width = bias.size if bias.size else out.size
    for row in range(0, out.size, width):
        row_high, row_low, row_out = (
            high[row : row + width],
            low[row : row + width],
            out[row : row + width],
        )
        if bias.size:
            for i in range(width):
                x = np.uint16(
                    np.uint16(np.uint8(row_high[i] + bias[i])) << 8 | np.uint16(row_low[i])
                )
                row_out[i] = np.uint16(x >> 1 | x << 15)
        else:
            for i in range(width):
                x = np.uint16(np.uint16(row_high[i]) << 8 | np.uint16(row_low[i]))
                row_out[i] = np.uint16(x >> 1 | x << 15)


@compiled(types.void(_bytes, _bytes, _bytes, _bytes, _bytes, types.uint32[::1]))
def _merge4(highest: Any, high: Any, low: Any, lowest: Any, bias: Any, out: Any) -> None:
    width = bias.size if bias.size else out.size
    for row in range(0, out.size, width):
        a, b, c, d, into = (
            highest[row : row + width],
            high[row : row + width],
            low[row : row + width],
            lowest[row : row + width],
            out[row : row + width],
        )
        for i in range(width):
            top = np.uint8(a[i] + bias[i]) if bias.size else a[i]
            x = (
                np.uint32(top) << 24
                | np.uint32(b[i]) << 16
                | np.uint32(c[i]) << 8
                | np.uint32(d[i])
            )
            into[i] = np.uint32(x >> 1 | x << 31)


@compiled(types.void(readonly(types.uint8, 2), _bytes, types.uint64[::1]))
def _merge(planes: Any, bias: Any, out: Any) -> None:
    size = planes.shape[0]
    top = np.uint64(8 * size - 1)
    width = bias.size if bias.size else out.size
    for row in range(0, out.size, width):
        for i in range(width):
            x = np.uint64(planes[0, row + i])
            if bias.size:
                x = (x + np.uint64(bias[i])) & _BYTE_MASK
            for plane in range(1, size):
                x = x << _u8 | np.uint64(planes[plane, row + i])
            out[row + i] = x >> _u1 | (x & _u1) << top


@compiled(types.void(_bytes, types.int64[::1]))
def _histogram(plane: Any, counts: Any) -> None:
    # four tables: equal neighbours do not wait
    parts = np.zeros((4, 256), np.uint32)
    whole = plane.size // 4 * 4
    for i in range(0, whole, 4):
        parts[0, plane[i]] += 1
        parts[1, plane[i + 1]] += 1
        parts[2, plane[i + 2]] += 1
        parts[3, plane[i + 3]] += 1
    for i in range(whole, plane.size):
        parts[0, plane[i]] += 1
    for value in range(256):
        counts[value] = (
            np.int64(parts[0, value]) + parts[1, value] + parts[2, value] + parts[3, value]
        )


@compiled(types.void(_bytes, types.int64[::1]))
def _channel_sums(plane: Any, sums: Any) -> None:
    width = sums.size
    partial = np.zeros(width, np.uint32)
    for row in range(0, plane.size, width):
        values = plane[row : row + width]
        for i in range(width):
            partial[i] += values[i]
        if row // width % (1 << 20) == (1 << 20) - 1:
            for i in range(width):
                sums[i] += partial[i]
                partial[i] = 0
    for i in range(width):
        sums[i] += partial[i]


@compiled(types.int64(_bytes, readonly(types.int64), types.uint16[::1], types.int64[::1]))
def _encode(plane: Any, freq: Any, words: Any, counts: Any) -> int:
    # (x * reciprocal) >> 44 divides exactly for f < 2**12 and x < f * 2**20
    begins = np.zeros(256, np.uint64)
    freqs = np.zeros(256, np.uint64)
    reciprocals = np.zeros(256, np.uint64)
    begin = np.uint64(0)
    for symbol in range(256):
        f = np.uint64(freq[symbol])
        begins[symbol] = begin
        freqs[symbol] = f
        if f:
            reciprocals[symbol] = ((_u1 << _u44) + f - _u1) // f
        begin += f
    states = np.empty(LANES, np.uint64)
    row = np.empty(SEGMENT + 1, np.uint16)
    used = 0
    for segment in range(counts.size):
        first = segment * SEGMENT
        symbols = min(SEGMENT, plane.size - first)
        states[:] = _LIMIT
        at = row.size
        lane = symbols % LANES
        for i in range(first + symbols - 1, first - 1, -1):
            lane = (lane - 1) % LANES
            symbol = plane[i]
            x = states[lane]
            f = freqs[symbol]
            # always written: no branch
            full = x >= f << _u20
            row[at - 1] = np.uint16(x & _WORD_MASK)
            at -= int(full)
            x = x >> _u16 if full else x
            q = (x * reciprocals[symbol]) >> _u44
            states[lane] = (q << _u12) + (x - q * f) + begins[symbol]
        begun = used
        for lane in range(LANES):
            words[used] = np.uint16(states[lane] & _WORD_MASK)
            words[used + 1] = np.uint16(states[lane] >> _u16)
            used += 2
        for i in range(at, row.size):
            words[used] = row[i]
            used += 1
        counts[segment] = used - begun
    return used


_row = ir.VectorType(ir.IntType(32), 16)
WIDE = "avx512vbmi2" in get_host_cpu_features() and get_host_cpu_features()["avx512vbmi2"]


def emit_step16(builder: Any, addresses: Any, scale_bits: int, kinds: Any = None) -> Any:
    """Decode one symbol in each of 16 lanes. Return the words taken; 16 must be readable.

    scale_bits: a table has 2**scale_bits entries: symbol (8 bits), frequency less one, offset
    kinds:      address of the lanes' table numbers; tables lie end to end
    """
    module, count = builder.module, 16
    bit, byte, half, word, long = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
    bits, bytes_, halves, longs = (ir.VectorType(kind, count) for kind in (bit, byte, half, long))

    def every(kind: Any, value: Any) -> Any:
        if isinstance(value, int):
            return ir.Constant(ir.VectorType(kind, count), [value] * count)
        single = builder.insert_element(
            ir.Constant(ir.VectorType(kind, count), ir.Undefined), value, word(0)
        )
        return builder.shuffle_vector(single, single, ir.Constant(_row, [0] * count))

    states, table, words, out = addresses
    at_states, at_words, at_out = (
        builder.inttoptr(address, kind.as_pointer())
        for address, kind in ((states, _row), (words, half), (out, bytes_))
    )
    mask = (1 << scale_bits) - 1
    x = builder.load(at_states, align=4)
    slots = builder.zext(builder.and_(x, every(word, mask)), longs)
    if kinds is not None:
        numbers = builder.zext(
            builder.load(builder.inttoptr(kinds, bytes_.as_pointer()), align=1), longs
        )
        slots = builder.or_(slots, builder.shl(numbers, every(long, scale_bits)))
    entries_at = builder.add(builder.shl(slots, every(long, 2)), every(long, table))
    pointers = builder.inttoptr(entries_at, ir.VectorType(word.as_pointer(), count))
    gather_type = ir.FunctionType(_row, [pointers.type, word, bits, _row])
    gather = cgutils.get_or_insert_function(module, gather_type, "llvm.masked.gather.v16i32.v16p0")
    entries = builder.call(gather, [pointers, word(4), every(bit, 1), every(word, 0)])
    builder.store(builder.trunc(entries, bytes_), at_out, align=1)
    freq = builder.add(
        builder.and_(builder.lshr(entries, every(word, 8)), every(word, mask)), every(word, 1)
    )
    within = builder.lshr(entries, every(word, 8 + scale_bits))
    x = builder.add(builder.mul(freq, builder.lshr(x, every(word, scale_bits))), within)
    wanted = builder.icmp_unsigned("<", x, every(word, _LOW))
    expand_type = ir.FunctionType(halves, [half.as_pointer(), bits, halves])
    expand = cgutils.get_or_insert_function(module, expand_type, "llvm.masked.expandload.v16i16")
    loaded = builder.zext(builder.call(expand, [at_words, wanted, every(half, 0)]), _row)
    x = builder.select(wanted, builder.or_(builder.shl(x, every(word, 16)), loaded), x)
    builder.store(x, at_states, align=4)
    return builder.zext(builder.ctpop(builder.bitcast(wanted, half)), long)


@intrinsic
def _step16(_: Any, states: Any, table: Any, words: Any, out: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_step16(builder, args, SCALE_BITS)

    return types.int64(types.int64, types.int64, types.int64, types.int64), emit


@compiled(
    types.boolean(
        readonly(types.uint16),
        readonly(types.int64),
        readonly(types.int64),
        types.boolean,
        types.uint8[::1],
    )
)
def _decode(words: Any, counts: Any, freq: Any, wide: bool, out: Any) -> bool:
    table, slot = (
        np.empty(SCALE, np.uint32),
        0,
    )
    for symbol in range(256):
        first = np.uint32(symbol) | np.uint32(freq[symbol] - 1) << np.uint32(8)
        for within in range(freq[symbol]):
            table[slot] = first | np.uint32(within) << np.uint32(20)
            slot += 1
    states = np.empty(LANES, np.uint32)
    begin = 0
    for segment in range(counts.size):
        for lane in range(LANES):
            states[lane] = np.uint32(words[begin + 2 * lane]) | np.uint32(
                words[begin + 2 * lane + 1]
            ) << np.uint32(16)
        at = np.uint64(begin + STATE_WORDS)
        begin += counts[segment]
        end = np.uint64(begin)
        i = segment * SEGMENT
        stop = min(i + SEGMENT, out.size)
        if wide:
            while i + LANES <= stop and at + np.uint64(LANES) <= end:
                for half in range(0, LANES, 16):
                    words_at = words.ctypes.data + 2 * np.int64(at)
                    at += np.uint64(
                        _step16(
                            states.ctypes.data + 4 * half,
                            table.ctypes.data,
                            words_at,
                            out.ctypes.data + i + half,
                        )
                    )
                i += LANES
        while i + LANES <= stop and at + np.uint64(LANES) <= end:
            for lane in range(LANES):
                x = np.uint64(states[lane])
                entry = np.uint64(table[x & _SLOT_MASK])
                x = ((entry >> _u8 & _SLOT_MASK) + _u1) * (x >> _u12) + (entry >> _u20)
                out[i + lane] = np.uint8(entry & _BYTE_MASK)
                word = np.uint64(words[at])
                wanted = x < _LIMIT
                states[lane] = np.uint32(x << _u16 | word if wanted else x)
                at += np.uint64(wanted)
            i += LANES
        lane = 0
        while i < stop:
            x = np.uint64(states[lane])
            entry = np.uint64(table[x & _SLOT_MASK])
            x = ((entry >> _u8 & _SLOT_MASK) + _u1) * (x >> _u12) + (entry >> _u20)
            out[i] = np.uint8(entry & _BYTE_MASK)
            if x < _LIMIT:
                if at == end:
                    return False
                x = x << _u16 | np.uint64(words[at])
                at += _u1
            states[lane] = np.uint32(x)
            lane = (lane + 1) % LANES
            i += 1
        if at != end:
            return False
        for lane in range(LANES):
            if states[lane] != np.uint32(_LOW):
                return False
    return True
