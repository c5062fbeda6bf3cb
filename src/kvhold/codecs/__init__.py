"""Chunks to frames, and back (docs/format.md). All but raw are imported on first use: that compiles
code.
"""

from kvhold.codecs.base import Codec
from kvhold.codecs.budget import check_loss, frame_within
from kvhold.codecs.chunk import (
    Frame,
    frame_chunk,
    max_frame_bytes,
    unframe_chunk,
    unframe_layer,
    unframe_payload,
)
from kvhold.codecs.frame import (
    FrameHeader,
    FrameSize,
    RunningChecksums,
    check_identity,
    encode_header,
    header_size,
    read_header,
    read_size,
    verify,
    verify_layer,
)
from kvhold.codecs.raw import Raw
from kvhold.codecs.registry import check_codec, codec_names, find_codec, make_codec

__all__ = [
    "Codec",
    "Frame",
    "FrameHeader",
    "FrameSize",
    "Raw",
    "RunningChecksums",
    "check_codec",
    "check_identity",
    "check_loss",
    "codec_names",
    "encode_header",
    "find_codec",
    "frame_chunk",
    "frame_within",
    "header_size",
    "make_codec",
    "max_frame_bytes",
    "read_header",
    "read_size",
    "unframe_chunk",
    "unframe_layer",
    "unframe_payload",
    "verify",
    "verify_layer",
]
