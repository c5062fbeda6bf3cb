"""A chunk's codec: the tier's, or a more exact one.

If a codec's error bound exceeds `max_error`, the frame's error is measured.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.codecs.base import Codec
from kvhold.codecs.chunk import Frame, arranged, frame_chunk, unframe_payload
from kvhold.codecs.elements import Elements
from kvhold.codecs.frame import ALIGNMENT, RAW, FrameHeader, group_of
from kvhold.codecs.registry import find_codec, make_codec
from kvhold.core.errors import FrameError
from kvhold.core.keys import allows_loss
from kvhold.core.layout import Layout
from kvhold.core.store_options import StoreOptions

LOSSLESS = "lossless"
LADDER = ("cachegen-small", "cachegen", "cachegen-fine", "fp8", "int8")  # largest error bound first


def frame_within(
    chunk: memoryview,
    codec: Codec,
    store_options: StoreOptions,
    *,
    key: bytes,
    layout: Layout,
    num_tokens: int,
    first_token: int,
    expires_at: int = 0,
    checksums: Sequence[int] | None = None,
    align: int = ALIGNMENT,
) -> Frame:
    """As `frame_chunk`."""

    def framed(by: Codec) -> Frame:
        return frame_chunk(
            chunk,
            by,
            key=key,
            layout=layout,
            num_tokens=num_tokens,
            first_token=first_token,
            expires_at=expires_at,
            checksums=checksums,
            align=align,
        )

    group = group_of(key, layout)
    is_exact = store_options.max_error == 0 or not allows_loss(key)
    if arranged(codec, layout, group) is None or (is_exact and not codec.lossless):
        codec = make_codec(LOSSLESS)
    if codec.lossless:
        return framed(codec)
    best: Frame | None = None
    for stronger in _stronger(codec):
        frame = framed(stronger)
        if not _is_within(frame, chunk, stronger, store_options, layout):
            break
        best = frame
        if (
            store_options.max_bits is None
            or _bits(frame, layout, group, num_tokens) <= store_options.max_bits
        ):
            break
    if best is not None:
        return best
    for better in _better(codec):
        frame = framed(better)
        if _is_within(frame, chunk, better, store_options, layout):
            return frame
    return framed(make_codec(LOSSLESS))


def check_loss(header: FrameHeader) -> None:
    """Raise FrameError("lossy") for a lossy frame of a chunk whose name allows no loss."""
    if header.codec == RAW or allows_loss(header.key):
        return
    codec = find_codec(header.codec)
    if codec is not None and not codec.lossless:
        raise FrameError(
            "lossy", f"codec {header.codec!r} is lossy, and the chunk's namespace allows no loss"
        )


def measured_error(before: Elements, after: Elements, dtype: str) -> float:
    """The largest |after - before| / the largest |before|, of elements as bits. Infinite if an
    infinity or NaN changed or appeared.
    """
    if np.array_equal(before, after):
        return 0.0
    one, other = _as_float32(before, dtype), _as_float32(after, dtype)
    finite = np.isfinite(one)
    if not np.array_equal(before[~finite], after[~finite]) or not np.isfinite(other[finite]).all():
        return float("inf")
    most = float(np.abs(one[finite]).max(initial=0.0))
    off = float(np.abs(one[finite].astype(np.float64) - other[finite]).max(initial=0.0))
    return off / most if most else float("inf")


def _as_float32(bits: Elements, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)


def _stronger(codec: Codec) -> Iterator[Codec]:
    yield codec
    for name in reversed(LADDER[: LADDER.index(codec.name)] if codec.name in LADDER else ()):
        yield make_codec(name)


def _better(codec: Codec) -> Iterator[Codec]:
    for name in LADDER[LADDER.index(codec.name) + 1 :] if codec.name in LADDER else LADDER:
        better = make_codec(name)
        if better.error_bound < codec.error_bound:
            yield better


def _bits(frame: Frame, layout: Layout, group: int, num_tokens: int) -> float:
    place = layout.groups[group]
    return (
        8
        * len(frame.payload)
        / (place.layers * place.planes * num_tokens * place.heads * place.head_dim)
    )


def _is_within(
    frame: Frame, chunk: memoryview, codec: Codec, store_options: StoreOptions, layout: Layout
) -> bool:
    if store_options.max_error is None or codec.error_bound <= store_options.max_error:
        return True
    fields = frame.fields
    group = layout.groups[group_of(fields.key, layout)]
    decoded = memoryview(bytearray(len(chunk)))
    unframe_payload(fields, frame.payload, decoded, layout=layout, find=lambda _: codec)
    per_layer = group.planes * fields.num_tokens * group.heads * group.head_dim
    kind: Any = np.dtype(f"<u{len(chunk) // (group.layers * per_layer)}")
    layers = len(fields.lengths)
    before, after = (np.frombuffer(data, kind).reshape(layers, -1) for data in (chunk, decoded))
    return all(
        measured_error(one, other, group.dtype) <= store_options.max_error
        for one, other in zip(before, after, strict=True)
    )
