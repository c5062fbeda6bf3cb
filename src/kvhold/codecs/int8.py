from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import CODED, Elements
from kvhold.codecs.quantised import LayerShape, Quantised, read_scales
from kvhold.kernels import numba_quantise as quantise

RUN = 128


class Int8(Quantised):
    """One byte per element, and a scale per run of 128 channels of a token and head.

    Zeros and the largest magnitudes are exact (docs/codecs.md).
    """

    name: ClassVar[str] = "int8"
    error_bound: ClassVar[float] = 1 / 127

    def _code(self, elements: Elements, place: LayerShape, out: memoryview) -> int | None:
        scales = _scales(place)
        end = 1 + 4 * scales + elements.size
        if end > place.nbytes or not quantise.all_finite(elements, place.dtype):
            return None
        largest = np.empty(scales, np.float32)
        codes = np.frombuffer(out, np.int8)[1 + 4 * scales : end]
        quantise.int8_encode(elements, place.dtype, place.head_dim, RUN, codes, largest)
        out[0] = CODED
        np.frombuffer(out[1 : 1 + 4 * scales], "<f4")[:] = largest
        return end

    def _restore(self, encoded: memoryview, place: LayerShape, target: Elements) -> None:
        scales = _scales(place)
        if encoded[0] != CODED or len(encoded) != 1 + 4 * scales + target.size:
            raise place.wrong(f"{len(encoded)} bytes of the form {encoded[0]}")
        largest = read_scales(encoded[1 : 1 + 4 * scales], place)
        codes = np.frombuffer(encoded[1 + 4 * scales :], np.int8)
        quantise.int8_decode(codes, largest, place.dtype, place.head_dim, RUN, target)


def _scales(place: LayerShape) -> int:
    return place.planes * place.tokens * place.heads * -(-place.head_dim // RUN)
