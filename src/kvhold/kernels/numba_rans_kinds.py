"""rANS as in numba_rans.py, with frequencies per kind of symbols.

A segment is whole rows of `width` symbols. A symbol's lane is its column modulo LANES.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic

from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_rans import LANES, STATE_WORDS, WIDE, Bytes, Counts, Words, emit_step16

Frequencies: TypeAlias = npt.NDArray[np.uint16]

SEGMENT = 1 << 17
SCALE_BITS = 10
SCALE = 1 << SCALE_BITS


def num_segments(symbols: int, width: int) -> int:
    return -(-symbols // segment_size(width))


def encode(symbols: Bytes, kinds: Bytes, width: int, freq: Frequencies) -> tuple[Words, Counts]:
    """As `numba_rans.encode`.

    symbols, kinds: [rows * width]
    freq:           [kinds, 256], each row of sum SCALE; not 0 for a symbol that occurs
    """
    _check(kinds, freq, symbols, width)
    segments = num_segments(symbols.size, width)
    words = np.empty(symbols.size + segments * STATE_WORDS, np.uint16)
    counts = np.zeros(segments, np.int64)
    used = _encode(symbols, kinds, width, segment_size(width), freq, words, counts)
    return words[:used], counts


def decode(
    words: Words,
    counts: Counts,
    kinds: Bytes,
    width: int,
    freq: Frequencies,
    out: Bytes,
    *,
    wide: bool | None = None,
) -> bool:
    """out: [rows * width]; else as `numba_rans.decode`"""
    _check(kinds, freq, out, width)
    assert counts.size == num_segments(out.size, width) and int(counts.sum()) == words.size
    assert int(counts.min(initial=STATE_WORDS)) >= STATE_WORDS
    return bool(
        _decode(
            words,
            counts,
            kinds,
            width,
            segment_size(width),
            freq,
            WIDE if wide is None else wide,
            out,
        )
    )


def segment_size(width: int) -> int:
    return max(SEGMENT // width, 1) * width


def _check(kinds: Bytes, freq: Frequencies, symbols: Bytes, width: int) -> None:
    assert width > 0 and symbols.size % width == 0 and kinds.size == symbols.size
    assert (
        freq.ndim == 2
        and freq.shape[1] == 256
        and bool((freq.sum(axis=1, dtype=np.int64) == SCALE).all())
    )
    assert int(kinds.max(initial=0)) < freq.shape[0]


_LOW = 1 << 16

_u1 = np.uint64(1)
_u8 = np.uint64(8)
_u16 = np.uint64(16)
_u32 = np.uint64(32)
_SCALE_BITS = np.uint64(SCALE_BITS)
_ENTRY_BITS = np.uint64(8 + SCALE_BITS)
_FULL_BITS = np.uint64(32 - SCALE_BITS)
_DIVISION_BITS = np.uint64(32 + SCALE_BITS)
_SLOT_MASK = np.uint64(SCALE - 1)
_BYTE_MASK = np.uint64(255)
_WORD_MASK = np.uint64(0xFFFF)
_RANGE_MASK = np.uint64(0xFFFF_FFFF)
_LIMIT = np.uint64(_LOW)

_bytes, _freq = readonly(types.uint8), readonly(types.uint16, 2)


@compiled(
    types.int64(
        _bytes, _bytes, types.int64, types.int64, _freq, types.uint16[::1], types.int64[::1]
    )
)
def _encode(
    symbols: Any, kinds: Any, width: int, segment_size: int, freq: Any, words: Any, counts: Any
) -> int:
    # a range: frequency above, begin below
    reciprocals, ranges = (
        np.zeros(freq.size, np.uint64),
        np.zeros(freq.size, np.uint64),
    )
    for kind in range(freq.shape[0]):
        begin = np.uint64(0)
        for symbol in range(256):
            f = np.uint64(freq[kind, symbol])
            ranges[kind << 8 | symbol] = f << _u32 | begin
            if f:
                reciprocals[kind << 8 | symbol] = ((_u1 << _DIVISION_BITS) + f - _u1) // f
            begin += f
    states = np.empty(LANES, np.uint64)
    row = np.empty(min(segment_size, symbols.size) + 1, np.uint16)
    used = 0
    for segment in range(counts.size):
        first = segment * segment_size
        states[:] = _LIMIT
        at = np.uint64(row.size - 1)
        begin_row = min(first + segment_size, symbols.size)
        while begin_row > first:
            begin_row -= width
            for block in range((width - 1) // LANES * LANES, -1, -LANES):
                lanes = min(LANES, width - block)
                block_symbols = symbols[begin_row + block : begin_row + block + lanes]
                block_kinds = kinds[begin_row + block : begin_row + block + lanes]
                for back in range(lanes):
                    place = np.uint64(lanes - 1 - back)
                    entry = np.uint64(block_kinds[place]) << _u8 | np.uint64(block_symbols[place])
                    x = states[place]
                    often = ranges[entry] >> _u32
                    full = x >= often << _FULL_BITS
                    row[at] = np.uint16(x & _WORD_MASK)
                    at -= np.uint64(full)
                    x = x >> _u16 if full else x
                    q = (x * reciprocals[entry]) >> _DIVISION_BITS
                    states[place] = (
                        (q << _SCALE_BITS) + (x - q * often) + (ranges[entry] & _RANGE_MASK)
                    )
        begun = used
        for lane in range(LANES):
            words[used] = np.uint16(states[lane] & _WORD_MASK)
            words[used + 1] = np.uint16(states[lane] >> _u16)
            used += 2
        for i in range(np.int64(at) + 1, row.size):
            words[used] = row[i]
            used += 1
        counts[segment] = used - begun
    return used


@intrinsic
def _step16(_: Any, states: Any, tables: Any, words: Any, out: Any, kinds: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_step16(builder, args[:4], SCALE_BITS, args[4])

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), emit


@njit(inline="always")
def _step32(states: Any, tables: Any, kinds: Any, words: Any, out: Any) -> Any:
    taken = np.uint32(0)
    for lane in range(LANES):
        x = states[lane]
        entry = tables[
            np.uint32(np.uint32(kinds[lane]) << np.uint32(SCALE_BITS))
            | np.uint32(x & np.uint32(SCALE - 1))
        ]
        often = np.uint32(np.uint32(entry >> np.uint32(8) & np.uint32(SCALE - 1)) + np.uint32(1))
        x = np.uint32(
            np.uint32(often * np.uint32(x >> np.uint32(SCALE_BITS)))
            + np.uint32(entry >> np.uint32(8 + SCALE_BITS))
        )
        out[lane] = np.uint8(entry & np.uint32(255))
        word = np.uint32(words[taken])
        wanted = x < np.uint32(_LOW)
        states[lane] = np.uint32(x << np.uint32(16)) | word if wanted else x
        taken = np.uint32(taken + np.uint32(wanted))
    return taken


_decoder = types.boolean(
    readonly(types.uint16),
    readonly(types.int64),
    _bytes,
    types.int64,
    types.int64,
    _freq,
    types.boolean,
    types.uint8[::1],
)


@compiled(_decoder)
def _decode(
    words: Any,
    counts: Any,
    kinds: Any,
    width: int,
    segment_size: int,
    freq: Any,
    wide: bool,
    out: Any,
) -> bool:
    tables = np.empty(freq.shape[0] << SCALE_BITS, np.uint32)
    slot = 0
    for kind in range(freq.shape[0]):
        for symbol in range(256):
            often = np.uint32(freq[kind, symbol])
            for within in range(often):
                tables[slot] = (
                    np.uint32(symbol)
                    | (often - np.uint32(1)) << np.uint32(8)
                    | np.uint32(within) << np.uint32(8 + SCALE_BITS)
                )
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
        first = segment * segment_size
        for row in range(first, min(first + segment_size, out.size), width):
            i, row_end = row, row + width
            while i + LANES <= row_end and at + np.uint64(LANES) <= end:
                if wide:
                    for half in range(0, LANES, 16):
                        words_at = words.ctypes.data + 2 * np.int64(at)
                        out_at, kinds_at = out.ctypes.data + i + half, kinds.ctypes.data + i + half
                        at += np.uint64(
                            _step16(
                                states.ctypes.data + 4 * half,
                                tables.ctypes.data,
                                words_at,
                                out_at,
                                kinds_at,
                            )
                        )
                else:
                    at += np.uint64(
                        _step32(
                            states,
                            tables,
                            kinds[i : i + LANES],
                            words[np.int64(at) :],
                            out[i : i + LANES],
                        )
                    )
                i += LANES
            lane = 0
            while i < row_end:
                x = np.uint64(states[lane])
                entry = np.uint64(tables[np.uint64(kinds[i]) << _SCALE_BITS | x & _SLOT_MASK])
                x = ((entry >> _u8 & _SLOT_MASK) + _u1) * (x >> _SCALE_BITS) + (
                    entry >> _ENTRY_BITS
                )
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
