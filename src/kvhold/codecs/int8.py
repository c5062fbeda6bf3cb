"""int8: one byte per element, and a scale for each run of 128 channels of a token and head.

docs/format.md ("int8") defines the bytes; kernels/numba_quantise.py has the arithmetic. A large
value in one token or head does not reduce the precision of others. Latent KV (MLA) has one wide
head of several runs, so its rotated part has its own scale.
"""

from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import CODED, Elements
from kvhold.codecs.quantised import Place, Quantised, read_scales
from kvhold.kernels import numba_quantise as quantise

RUN = 128


class Int8(Quantised):
    """Symmetric quantisation by the largest magnitude of each run, which is stored in float32.

    |decoded - original| is at most 1/254 of the run's largest magnitude (half a step) plus half a
    unit in the last place of the dtype, together at most 1/127 of that magnitude. Zeros and the
    values of the largest magnitude are exact, and no value becomes infinite. A layer is stored
    unchanged if it has an infinity or a NaN, or if it would not become smaller.
    """

    name: ClassVar[str] = "int8"
    error_bound: ClassVar[float] = 1 / 127

    def _code(self, elements: Elements, place: Place, out: memoryview) -> int | None:
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

    def _restore(self, encoded: memoryview, place: Place, target: Elements) -> None:
        scales = _scales(place)
        if encoded[0] != CODED or len(encoded) != 1 + 4 * scales + target.size:
            raise place.wrong(f"{len(encoded)} bytes of the form {encoded[0]}")
        largest = read_scales(encoded[1 : 1 + 4 * scales], place)
        codes = np.frombuffer(encoded[1 + 4 * scales :], np.int8)
        quantise.int8_decode(codes, largest, place.dtype, place.head_dim, RUN, target)


def _scales(place: Place) -> int:
    """Return the number of runs in a layer."""
    return place.planes * place.tokens * place.heads * -(-place.head_dim // RUN)
