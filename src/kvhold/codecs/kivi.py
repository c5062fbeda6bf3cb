"""KIVI: 4 or 2 bits per element, between the least and the largest of its group (docs/codecs.md).

After Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML 2024).
"""

from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import CODED, Elements, read_elements
from kvhold.codecs.quantised import LayerShape, Quantised
from kvhold.core.layout import DTYPE_BYTES
from kvhold.kernels import numba_groups as groups
from kvhold.kernels.numba_floats import LEAST_NORMAL, Bytes
from kvhold.kernels.numba_quantise import all_finite

# far above the range where float32 is inexact
SMALLEST = 2.0**-100


class KIVI(Quantised):
    """Latent KV (MLA) is coded like keys."""

    name: ClassVar[str] = "kivi4"
    error_bound: ClassVar[float] = 0.071  # 1/15 + 1/256
    bits: ClassVar[int] = 4

    def _code(self, elements: Elements, place: LayerShape, out: memoryview) -> int | None:
        if not all_finite(elements, place.dtype):
            return None
        planes = elements.reshape(place.planes, place.tokens, place.width)
        end = 1 + keys_bytes(place, self.bits) + (place.planes - 1) * values_bytes(place, self.bits)
        if end > place.nbytes:
            return None
        begin = 1 + keys_bytes(place, self.bits)
        largest = write_keys(planes[0], place, self.bits, out[1:begin])
        for plane in planes[1:]:
            largest = max(largest, write_values(plane, place, self.bits, out[begin:end]))
        if is_too_small(largest, place):
            return None
        out[0] = CODED
        return end

    def _restore(self, encoded: memoryview, place: LayerShape, target: Elements) -> None:
        begin = 1 + keys_bytes(place, self.bits)
        if encoded[0] != CODED or len(encoded) != begin + (place.planes - 1) * values_bytes(
            place, self.bits
        ):
            raise place.wrong(f"{len(encoded)} bytes of the form {encoded[0]}")
        planes = target.reshape(place.planes, place.tokens, place.width)
        read_keys(encoded[1:begin], place, self.bits, planes[0])
        for plane in planes[1:]:
            read_values(encoded[begin:], place, self.bits, plane)


class KIVI2(KIVI):
    name: ClassVar[str] = "kivi2"
    error_bound: ClassVar[float] = 0.338  # 1/3 + 1/256
    bits: ClassVar[int] = 2


def keys_bytes(place: LayerShape, bits: int) -> int:
    full, rest = divmod(place.tokens, groups.GROUP)
    coded = full * groups.GROUP * groups.packed_width(place.width, bits)
    return coded + (2 * full + rest) * place.width * DTYPE_BYTES[place.dtype]


def values_bytes(place: LayerShape, bits: int) -> int:
    ends = 2 * groups.num_groups(place.width, place.head_dim) * DTYPE_BYTES[place.dtype]
    return place.tokens * (ends + groups.packed_width(place.width, bits))


def write_keys(plane: Elements, place: LayerShape, bits: int, out: memoryview) -> float:
    """plane: [tokens, width]. Returns the largest coded magnitude."""
    full = place.tokens // groups.GROUP
    ends = np.empty((full, 2, place.width), plane.dtype)
    codes, rest = _keys_parts(np.frombuffer(out, np.uint8), place, bits, ends)
    groups.columns_encode(
        plane[: full * groups.GROUP], place.dtype, bits=bits, ends=ends, codes=codes
    )
    rest[:] = plane[full * groups.GROUP :].reshape(-1).view(np.uint8)
    np.frombuffer(out, np.uint8)[: ends.nbytes] = ends.reshape(-1).view(np.uint8)
    return largest_magnitude(ends, place.dtype)


def read_keys(encoded: memoryview, place: LayerShape, bits: int, plane: Elements) -> None:
    full = place.tokens // groups.GROUP
    ends = _read_ends(encoded, place, (full, 2, place.width))
    codes, rest = _keys_parts(np.frombuffer(encoded, np.uint8), place, bits, ends)
    groups.columns_decode(
        codes, ends, place.dtype, bits=bits, elements=plane[: full * groups.GROUP]
    )
    plane[full * groups.GROUP :].reshape(-1).view(np.uint8)[:] = rest


def write_values(plane: Elements, place: LayerShape, bits: int, out: memoryview) -> float:
    ends = np.empty((place.tokens, 2, groups.num_groups(place.width, place.head_dim)), plane.dtype)
    codes = np.frombuffer(out, np.uint8)[ends.nbytes :].reshape(place.tokens, -1)
    groups.rows_encode(
        plane, place.dtype, head_dim=place.head_dim, bits=bits, ends=ends, codes=codes
    )
    np.frombuffer(out, np.uint8)[: ends.nbytes] = ends.reshape(-1).view(np.uint8)
    return largest_magnitude(ends, place.dtype)


def read_values(encoded: memoryview, place: LayerShape, bits: int, plane: Elements) -> None:
    ends = _read_ends(
        encoded, place, (place.tokens, 2, groups.num_groups(place.width, place.head_dim))
    )
    codes = np.frombuffer(encoded, np.uint8)[ends.nbytes :].reshape(place.tokens, -1)
    groups.rows_decode(codes, ends, place.dtype, head_dim=place.head_dim, bits=bits, elements=plane)


def is_too_small(largest: float, place: LayerShape) -> bool:
    """Then the layer is stored unchanged, to keep the error bound."""
    return 0 < largest < max(LEAST_NORMAL[place.dtype], SMALLEST)


def largest_magnitude(elements: Elements, dtype: str) -> float:
    most = (elements & (np.iinfo(elements.dtype).max >> 1)).max(initial=0)
    if dtype == "float16":
        return float(np.asarray(most, np.uint16).view(np.float16))
    wide = np.uint32(most) << np.uint32(16 if dtype == "bfloat16" else 0)
    return float(np.asarray(wide, np.uint32).view(np.float32))


def _keys_parts(data: Bytes, place: LayerShape, bits: int, ends: Elements) -> tuple[Bytes, Bytes]:
    tokens, packed = len(ends) * groups.GROUP, groups.packed_width(place.width, bits)
    begin = ends.nbytes + tokens * packed
    return data[ends.nbytes : begin].reshape(tokens, packed), data[begin:]


def _read_ends(encoded: memoryview, place: LayerShape, shape: tuple[int, int, int]) -> Elements:
    """[groups, 2, ...]. Raises FrameError unless finite and in order."""
    nbytes = shape[0] * shape[1] * shape[2] * DTYPE_BYTES[place.dtype]
    ends = read_elements(encoded[:nbytes], place.kind).reshape(shape)
    order = _order(ends)
    if not all_finite(ends.reshape(-1), place.dtype) or (order[:, 0] > order[:, 1]).any():
        raise place.wrong("the ends of a group are not finite or not in order")
    return ends


def _order(bits: Elements) -> Elements:
    signed = bits.view(f"<i{bits.itemsize}")
    return np.asarray(np.where(signed < 0, signed ^ np.iinfo(signed.dtype).max, signed))
