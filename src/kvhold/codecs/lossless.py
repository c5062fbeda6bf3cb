"""lossless: byte planes, coded by rANS where that compresses.

Each channel's mean exponent is subtracted if that saves bytes.
"""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import CODED, RAW, Reader, read_elements, written_elements
from kvhold.codecs.raw import copy
from kvhold.core.layout import CANONICAL, DTYPE_BYTES, Layout
from kvhold.kernels import numba_rans as rans
from kvhold.kernels.numba_rans import Bytes

PLAIN, CONSTANT, CODED_PLANE, BIASED_PLANE = range(4)

# a step of the exponent, in the first byte of an element with rotated bits
_EXPONENT_STEP = {
    "float64": 1,
    "float32": 1,
    "bfloat16": 1,
    "float16": 8,
    "float8_e5m2": 8,
    "float8_e4m3fn": 16,
    "float8_e4m3fnuz": 16,
}
_LEAST_GAIN = 32
_LEAST_TOKENS = 8  # a bias costs a byte per channel
_SYMBOL = Struct("<BH")


@dataclass(frozen=True)
class _Cut:
    parts: int
    elements: int
    size: int
    width: int
    step: int  # 0: no bias

    @property
    def kind(self) -> str:
        return f"<u{self.size}"


def _cut(layout: Layout, group: int, num_tokens: int) -> _Cut:
    place = layout.groups[group]
    nbytes, size = place.layer_bytes(num_tokens), DTYPE_BYTES[place.dtype]
    width, step = place.heads * place.head_dim, _EXPONENT_STEP.get(place.dtype, 0)
    if place.packing == CANONICAL:
        return _Cut(place.planes, nbytes // size // place.planes, size, width, step)
    if nbytes % size:
        size = 1
    elements = nbytes // size
    return _Cut(1, elements, size, width, step if elements % width == 0 else 0)


class Lossless:
    """A layer grows by at most one byte."""

    name: ClassVar[str] = "lossless"
    lossless: ClassVar[bool] = True
    error_bound: ClassVar[float] = 0.0

    def accepts(self, layout: Layout, group: int) -> bool:
        return True

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        return 1 + layout.groups[group].layer_bytes(num_tokens)

    def encode(
        self,
        plain: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> int:
        cut = _cut(layout, group, num_tokens)
        elements = read_elements(plain, cut.kind).reshape(cut.parts, cut.elements)
        target, end = np.frombuffer(out, np.uint8), 1
        for part in elements:
            for plane, values in enumerate(rans.split(part)):
                for piece in _encode_plane(
                    values, cut.width if plane == 0 and cut.step else 0, cut.step
                ):
                    if end + len(piece) > len(plain):
                        out[0] = RAW
                        copy(plain, out[1 : 1 + len(plain)])
                        return 1 + len(plain)
                    target[end : end + len(piece)] = piece
                    end += len(piece)
        out[0] = CODED
        return end

    def decode(
        self,
        encoded: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> None:
        reader = Reader(encoded, self.name, layer)
        form = reader.byte()
        if form == RAW:
            copy(reader.take(len(out)), out)
        elif form == CODED:
            cut = _cut(layout, group, num_tokens)
            with written_elements(out, cut.kind) as elements:
                for part in elements.reshape(cut.parts, cut.elements):
                    planes, bias = [], None
                    for plane in range(cut.size):
                        values, found = _decode_plane(reader, cut, biased=plane == 0)
                        planes.append(values)
                        bias = bias if found is None else found
                    rans.merge(planes, bias, part)
        else:
            raise reader.wrong(f"of the form {form}")
        reader.end()


def _encode_plane(values: Bytes, width: int, step: int) -> list[Bytes]:
    counts = rans.histogram(values)
    if counts.max(initial=0) == values.size:
        return [np.array([CONSTANT, values[0] if values.size else 0], np.uint8)]
    form, bias, symbols = CODED_PLANE, np.empty(0, np.uint8), values
    freq = rans.frequencies(counts)
    cost = _coded_bytes(counts, freq)
    if width and values.size >= _LEAST_TOKENS * width:
        means = rans.channel_sums(values, width) * width // values.size
        bias = ((means + step // 2) // step * step).astype(np.uint8)
        shifted = (values.reshape(-1, width) - bias).reshape(-1)
        shifted_counts = rans.histogram(shifted)
        if shifted_counts.max() < shifted.size:
            shifted_freq = rans.frequencies(shifted_counts)
            shifted_cost = _coded_bytes(shifted_counts, shifted_freq) + width
            if shifted_cost < cost:
                form, cost, symbols, freq = BIASED_PLANE, shifted_cost, shifted, shifted_freq
    if cost > values.size - values.size / _LEAST_GAIN:
        return [np.array([PLAIN], np.uint8), values]
    words, segments = rans.encode(symbols, freq)
    present = np.flatnonzero(freq)
    table = bytes([present.size - 1]) + b"".join(
        _SYMBOL.pack(symbol, freq[symbol]) for symbol in present
    )
    pieces = [np.array([form], np.uint8)]
    if form == BIASED_PLANE:
        pieces.append(bias)
    return [
        *pieces,
        np.frombuffer(table, np.uint8),
        segments.astype("<u4").view(np.uint8),
        words.astype("<u2").view(np.uint8),
    ]


def _coded_bytes(counts: rans.Counts, freq: rans.Counts) -> float:
    present = counts > 0
    bits = float((counts[present] * (rans.SCALE_BITS - np.log2(freq[present]))).sum())
    overhead = rans.num_segments(int(counts.sum())) * (4 + 2 * rans.STATE_WORDS)
    return bits / 8 + overhead + int(present.sum()) * _SYMBOL.size + 2


def _decode_plane(reader: Reader, cut: _Cut, *, biased: bool) -> tuple[Bytes, Bytes | None]:
    form = reader.byte()
    if form == PLAIN:
        return np.frombuffer(reader.take(cut.elements), np.uint8), None
    values = np.empty(cut.elements, np.uint8)
    if form == CONSTANT:
        values.fill(reader.byte())
        return values, None
    if form != CODED_PLANE and not (form == BIASED_PLANE and biased and cut.step):
        raise reader.wrong(f"a plane of the form {form}")
    bias = np.frombuffer(reader.take(cut.width), np.uint8) if form == BIASED_PLANE else None
    table = reader.take((1 + reader.byte()) * _SYMBOL.size)
    freq, last = np.zeros(256, np.int64), -1
    for symbol, often in _SYMBOL.iter_unpack(table):
        if symbol <= last or not often:
            raise reader.wrong("frequencies that are not in order")
        freq[symbol], last = often, symbol
    if freq.sum() != rans.SCALE:
        raise reader.wrong(f"frequencies of the sum {freq.sum()}")
    segments = np.frombuffer(reader.take(4 * rans.num_segments(cut.elements)), "<u4").astype(
        np.int64
    )
    if segments.min(initial=rans.STATE_WORDS) < rans.STATE_WORDS:
        raise reader.wrong("a segment shorter than its states")
    words = read_elements(reader.take(2 * int(segments.sum())), "<u2")
    if not rans.decode(words, segments, freq, values):
        raise reader.wrong("a segment that does not end where it began")
    return values, bias
