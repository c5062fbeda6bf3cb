"""Decode a plane of `codecs/cachegen.py` in one compiled call.

The bytes are not trusted.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from kvhold.kernels.numba_bins import ESCAPE, REACH, Counts, _dequantise, _spread_kinds
from kvhold.kernels.numba_compile import compiled, readonly
from kvhold.kernels.numba_floats import KINDS, Bytes, Elements, Floats
from kvhold.kernels.numba_rans import STATE_WORDS, WIDE
from kvhold.kernels.numba_rans_kinds import SCALE, _decode, num_segments, segment_size

TOO_SHORT, NO_FREQUENCIES, BAD_FREQUENCIES, SHORT_SEGMENT, BAD_END, BAD_EXCEPTIONS = range(
    -1, -7, -1
)

WRONG = {
    TOO_SHORT: "bytes missing",
    NO_FREQUENCIES: "a class without frequencies",
    BAD_FREQUENCIES: "too many frequencies, or frequencies of too large a sum",
    SHORT_SEGMENT: "a segment shorter than its states",
    BAD_END: "a segment that does not end where it began",
    BAD_EXCEPTIONS: "more or fewer exceptions than are marked",
}


class PlaneShape(NamedTuple):
    """groups: int64 [width], the group of each channel, ascending from 0."""

    tokens: int
    groups: Counts
    bounds: Counts


def restore(
    data: Bytes,
    shape: PlaneShape,
    widths: Floats,
    num_kinds: int,
    shifted: bool,
    dtype: str,
    elements: Elements,
) -> int:
    """Fill `elements` [tokens * width]. Return the bytes used, or a key of WRONG.

    widths: float32 [8], the step of each octave; finite, not negative
    """
    width = shape.groups.size
    assert (
        elements.size == shape.tokens * width
        and shape.bounds[-1] == width
        and widths.size == 8
        and 1 <= num_kinds <= 16
    )
    segments = num_segments(elements.size, width)
    return int(
        _restore(
            data,
            shape.groups,
            shape.bounds,
            widths,
            num_kinds,
            shifted,
            segments,
            segment_size(width),
            WIDE,
            KINDS[dtype],
            elements,
        )
    )


_UINTS = (types.uint16, types.uint32)
_u8r, _f32r, _i64r = (readonly(kind) for kind in (types.uint8, types.float32, types.int64))


@njit(inline="always")
def _uint32(data: Any, at: int) -> Any:
    return (
        np.int64(data[at])
        | np.int64(data[at + 1]) << 8
        | np.int64(data[at + 2]) << 16
        | np.int64(data[at + 3]) << 24
    )


@compiled(
    *(
        types.int64(
            _u8r,
            _i64r,
            _i64r,
            _f32r,
            types.int64,
            types.boolean,
            types.int64,
            types.int64,
            types.boolean,
            types.int64,
            kind[::1],
        )
        for kind in _UINTS
    )
)
def _restore(
    data: Any,
    groups: Any,
    bounds: Any,
    widths: Any,
    num_kinds: int,
    shifted: bool,
    num_segments: int,
    segment_size: int,
    wide: bool,
    kind: int,
    elements: Any,
) -> Any:
    width = groups.size
    tokens, runs, num_groups = elements.size // width, bounds.size - 1, groups[-1] + 1
    if data.size < num_groups:
        return TOO_SHORT
    at = num_groups
    of_groups = np.zeros(num_groups, np.int8)
    for group in range(num_groups):
        if data[group] & 15 >= num_kinds:
            return NO_FREQUENCIES
        if data[group] >= 128:
            if at == data.size:
                return TOO_SHORT
            of_groups[group] = np.int8(data[at])
            at += 1
    classes, offsets, steps = (
        np.empty(width, np.uint8),
        np.empty(width, np.int8),
        np.empty(width, np.float32),
    )
    for i in range(width):
        channel = data[groups[i]]
        classes[i], offsets[i], steps[i] = (
            channel & 15,
            of_groups[groups[i]],
            widths[channel >> 4 & 7],
        )

    kinds = np.empty(elements.size, np.uint8)
    if shifted:
        count = tokens * runs
        if data.size - at < (count + 1) // 2:
            return TOO_SHORT
        shifts = np.empty((tokens, runs), np.int8)
        for i in range(count):
            half = data[at + i // 2] >> (4 * (i % 2)) & 15
            shifts[i // runs, i % runs] = np.int8(np.int64(half ^ 8) - 8)
        at += (count + 1) // 2
        _spread_kinds(classes, shifts, bounds, num_kinds, kinds)
    else:
        for token in range(tokens):
            kinds[token * width : (token + 1) * width] = classes

    lengths_at, at = at, at + num_kinds
    if data.size < at:
        return TOO_SHORT
    probabilities = np.zeros((num_kinds, 256), np.uint16)
    for number in range(num_kinds):
        length = np.int64(data[lengths_at + number])
        if length > REACH + 1:
            return BAD_FREQUENCIES
        if data.size - at < 2 * length:
            return TOO_SHORT
        left: Any = SCALE
        for m in range(length):
            often = np.int64(data[at]) | np.int64(data[at + 1]) << 8
            at += 2
            left -= 2 * often if m else often
            probabilities[number, m] = probabilities[number, -m] = often
        if left < 0:
            return BAD_FREQUENCIES
        probabilities[number, 0 if length == 0 else ESCAPE] = left

    if data.size - at < 4:
        return TOO_SHORT
    used = _uint32(data, at)
    at += 4
    if data.size - at < used:
        return TOO_SHORT
    exceptions = data[at : at + used].view(np.int8)
    at += used
    if data.size - at < 4 * num_segments:
        return TOO_SHORT
    counts: Any = np.empty(num_segments, np.int64)
    num_words = 0
    for number in range(num_segments):
        counts[number] = _uint32(data, at)
        at += 4
        num_words += counts[number]
        if counts[number] < STATE_WORDS:
            return SHORT_SEGMENT
    if data.size - at < 2 * num_words:
        return TOO_SHORT
    words = np.empty(num_words, np.uint16)
    for i in range(num_words):
        words[i] = np.uint16(data[at + 2 * i]) | np.uint16(data[at + 2 * i + 1]) << 8
    at += 2 * num_words

    symbols = np.empty(elements.size, np.uint8)
    if not _decode(words, counts, kinds, width, segment_size, probabilities, wide, symbols):
        return BAD_END
    if not _dequantise(symbols, offsets, steps, exceptions, kind, elements):
        return BAD_EXCEPTIONS
    return at
