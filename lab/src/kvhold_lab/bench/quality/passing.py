"""Encode and decode KV, as for a tier. Chunks that a codec does not accept stay raw."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.codecs import Codec, Raw, find_codec, frame_chunk, unframe_chunk
from kvhold.codecs.budget import measured_error
from kvhold.core.keys import HASH_BYTES, Namespace, make_key
from kvhold.core.layout import Layout

Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Passed:
    """error: as in `CodecRow`"""

    bits: Bits
    plain_bytes: int
    frame_bytes: int
    error: float


def through(codec: Codec, kv: Bits, layout: Layout) -> Passed:
    """KV: bfloat16 as uint16, `[exams, layers, 2, tokens, heads, head_dim]`."""
    used = codec if codec.accepts(layout, 0) else Raw()
    namespace = Namespace(model="bench quality", layout=layout).digest
    decoded = np.empty_like(kv)
    frame_bytes, error, step = 0, 0.0, layout.tokens_per_chunk
    for exam in range(kv.shape[0]):
        for start in range(0, kv.shape[3], step):
            chunk = np.ascontiguousarray(kv[exam, :, :, start : start + step])
            key = make_key(namespace, (exam << 32 | start).to_bytes(HASH_BYTES, "little"), 0, 0)
            back = np.empty_like(chunk)
            frame_bytes += _there_and_back(
                used, chunk, back, key=key, layout=layout, first_token=start
            )
            error = max(
                error,
                *(
                    measured_error(before, after, "bfloat16")
                    for before, after in zip(chunk, back, strict=True)
                ),
            )
            decoded[exam, :, :, start : start + step] = back
    return Passed(decoded, kv.nbytes, frame_bytes, error)


def _there_and_back(
    codec: Codec, chunk: Bits, back: Bits, *, key: bytes, layout: Layout, first_token: int
) -> int:
    place: dict[str, Any] = {
        "key": key,
        "layout": layout,
        "num_tokens": chunk.shape[2],
        "first_token": first_token,
    }
    frame = frame_chunk(_view(chunk), codec, **place)
    written = memoryview(b"".join(frame.parts))

    def find(name: str) -> Codec | None:
        return codec if name == codec.name else find_codec(name)

    unframe_chunk(written, _view(back), **place, find=find)
    return len(written)


def _view(array: Bits) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
