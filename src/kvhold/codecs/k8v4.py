from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import CODED, Elements
from kvhold.codecs.int8 import RUN
from kvhold.codecs.kivi import is_too_small, read_values, values_bytes, write_values
from kvhold.codecs.quantised import LayerShape, Quantised, read_scales
from kvhold.kernels import numba_quantise as quantise

VALUE_BITS = 4


class K8V4(Quantised):
    """Keys as in `int8`, values as in `kivi4`. Latent KV (MLA) is coded like keys."""

    name: ClassVar[str] = "k8v4"
    error_bound: ClassVar[float] = 0.071  # 1/15 + 1/256

    def _code(self, elements: Elements, place: LayerShape, out: memoryview) -> int | None:
        begin = 1 + _keys_bytes(place)
        end = begin + (place.planes - 1) * values_bytes(place, VALUE_BITS)
        if end > place.nbytes or not quantise.all_finite(elements, place.dtype):
            return None
        planes = elements.reshape(place.planes, place.tokens, place.width)
        for plane in planes[1:]:
            if is_too_small(write_values(plane, place, VALUE_BITS, out[begin:end]), place):
                return None
        largest = np.empty(_scales(place), np.float32)
        codes = np.frombuffer(out, np.int8)[1 + largest.nbytes : begin]
        quantise.int8_encode(
            planes[0].reshape(-1), place.dtype, place.head_dim, RUN, codes, largest
        )
        out[0] = CODED
        np.frombuffer(out[1 : 1 + largest.nbytes], "<f4")[:] = largest
        return end

    def _restore(self, encoded: memoryview, place: LayerShape, target: Elements) -> None:
        begin = 1 + _keys_bytes(place)
        if encoded[0] != CODED or len(encoded) != begin + (place.planes - 1) * values_bytes(
            place, VALUE_BITS
        ):
            raise place.wrong(f"{len(encoded)} bytes of the form {encoded[0]}")
        planes = target.reshape(place.planes, place.tokens, place.width)
        largest = read_scales(encoded[1 : 1 + 4 * _scales(place)], place)
        codes = np.frombuffer(encoded[1 + largest.nbytes : begin], np.int8)
        quantise.int8_decode(
            codes, largest, place.dtype, place.head_dim, RUN, planes[0].reshape(-1)
        )
        for plane in planes[1:]:
            read_values(encoded[begin:], place, VALUE_BITS, plane)


def _scales(place: LayerShape) -> int:
    return place.tokens * place.heads * -(-place.head_dim // RUN)


def _keys_bytes(place: LayerShape) -> int:
    return 4 * _scales(place) + place.tokens * place.width
