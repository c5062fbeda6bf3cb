"""turboquant4: 4 bits per channel of a randomly rotated vector (docs/codecs.md).

After Zandieh et al., "TurboQuant" (2025), with a Hadamard matrix and random signs.
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvhold.codecs.elements import CODED, Elements, read_elements
from kvhold.codecs.kivi import is_too_small, largest_magnitude
from kvhold.codecs.quantised import LayerShape, Quantised
from kvhold.kernels import numba_hadamard as turns
from kvhold.kernels.numba_floats import Floats
from kvhold.kernels.numba_quantise import all_finite

LIMIT = 0.145  # of the layer's largest magnitude


class TurboQuant4(Quantised):
    """A vector is a run of 128 channels of a head in one token, stored unchanged if an error
    exceeds LIMIT.
    """

    name: ClassVar[str] = "turboquant4"
    error_bound: ClassVar[float] = 0.15  # 0.145 + 1.145 / 256

    def _code(self, elements: Elements, place: LayerShape, out: memoryview) -> int | None:
        heads, head_dim = elements.size // place.head_dim, place.head_dim
        begin, end = _parts(place)
        if end > place.nbytes or not all_finite(elements, place.dtype):
            return None
        most = largest_magnitude(elements, place.dtype)
        if is_too_small(most, place):
            return None
        scales = np.empty((heads, -(-head_dim // turns.RUN)), np.float32)
        data = np.frombuffer(out, np.uint8)
        codes = data[begin:end].reshape(heads, -1)
        turns.encode(
            elements, place.dtype, head_dim=head_dim, limit=LIMIT * most, codes=codes, scales=scales
        )
        for kept, channels in _kept(scales, head_dim):
            found = elements.reshape(heads, head_dim)[kept, channels].reshape(-1).view(np.uint8)
            if end + found.size > place.nbytes:
                return None
            data[end : end + found.size] = found
            end += found.size
        out[0] = CODED
        data[1:begin] = scales.reshape(-1).astype("<f4").view(np.uint8)
        return end

    def _restore(self, encoded: memoryview, place: LayerShape, target: Elements) -> None:
        heads, head_dim = target.size // place.head_dim, place.head_dim
        begin, end = _parts(place)
        if encoded[0] != CODED or len(encoded) < end:
            raise place.wrong(f"{len(encoded)} bytes of the form {encoded[0]}")
        scales: Floats = read_elements(encoded[1:begin], "<f4").reshape(heads, -1)
        if not ((scales >= 0) | (scales == turns.KEPT)).all() or not np.isfinite(scales).all():
            raise place.wrong("a scale that is negative or not finite")
        found = list(_kept(scales, head_dim))
        sizes = [
            int(np.count_nonzero(kept)) * (channels.stop - channels.start)
            for kept, channels in found
        ]
        if len(encoded) != end + sum(sizes) * target.itemsize:
            raise place.wrong(f"{len(encoded)} bytes of the form {encoded[0]}")
        codes = np.frombuffer(encoded[begin:end], np.uint8).reshape(heads, -1)
        turns.decode(codes, scales, place.dtype, head_dim=head_dim, elements=target)
        for (kept, channels), size in zip(found, sizes, strict=True):
            nbytes = size * target.itemsize
            target.reshape(heads, head_dim)[kept, channels] = read_elements(
                encoded[end : end + nbytes], place.kind
            ).reshape(-1, channels.stop - channels.start)
            end += nbytes


def _parts(place: LayerShape) -> tuple[int, int]:
    heads = place.planes * place.tokens * place.heads
    begin = 1 + 4 * heads * -(-place.head_dim // turns.RUN)
    return begin, begin + heads * turns.head_bytes(place.head_dim)


def _kept(scales: Floats, head_dim: int) -> Iterator[tuple[npt.NDArray[np.bool_], slice]]:
    for run in range(scales.shape[1]):
        yield (
            scales[:, run] == turns.KEPT,
            slice(run * turns.RUN, min(head_dim, (run + 1) * turns.RUN)),
        )
