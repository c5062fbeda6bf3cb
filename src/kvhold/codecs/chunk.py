"""Encode chunks into frames, and decode them. Releases the GIL.

Where a codec does not accept a packing, the canonical one is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from operator import index

from kvhold.codecs.base import Codec
from kvhold.codecs.frame import (
    ALIGNMENT,
    RAW,
    FrameHeader,
    check_identity,
    checksum,
    encode_header,
    group_of,
    header_size,
    layer_shape,
    read_header,
    verify_layer,
)
from kvhold.codecs.packings import canonical_twin, from_canonical, to_canonical
from kvhold.codecs.registry import FindCodec, find_codec
from kvhold.core.errors import FrameError, LayoutError
from kvhold.core.layout import Layout


@dataclass(frozen=True)
class Frame:
    fields: FrameHeader
    header: memoryview
    payload: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.header) + len(self.payload)

    @property
    def parts(self) -> tuple[memoryview, memoryview]:
        return self.header, self.payload


def arranged(codec: Codec, layout: Layout, group: int) -> Layout | None:
    """None: `codec` does not accept the group."""
    for candidate in (layout, canonical_twin(layout, group)):
        if candidate is not None and codec.accepts(candidate, group):
            return candidate
    return None


def max_frame_bytes(
    codec: Codec, layout: Layout, group: int, num_tokens: int, *, align: int = ALIGNMENT
) -> int:
    layers = layout.groups[group].layers
    rank = len(layer_shape(layout, group, num_tokens)[1])
    of_codec = arranged(codec, layout, group) or layout
    return header_size(rank=rank, num_layers=layers, align=align) + layers * codec.max_size(
        of_codec, group, _tokens(layout, group, of_codec, num_tokens)
    )


def _tokens(layout: Layout, group: int, of_codec: Layout, num_tokens: int) -> int:
    """Rearranged blocks are whole."""
    block = 1 if of_codec is layout else layout.groups[group].block_tokens
    return -(-num_tokens // block) * block


def frame_chunk(
    chunk: memoryview,
    codec: Codec,
    *,
    key: bytes,
    layout: Layout,
    num_tokens: int,
    first_token: int,
    expires_at: int = 0,
    checksums: Sequence[int] | None = None,
    out: memoryview | None = None,
    align: int = ALIGNMENT,
) -> Frame:
    """chunk:     `layout.chunk_bytes(group, num_tokens)` bytes; a raw frame uses them
    checksums: [layers], if known; only for a raw frame
    out:       at least `max_frame_bytes`; without it raw copies nothing
    align:     of the payload's start, a multiple of 8; direct I/O needs 4096

    Raises LayoutError if layout or codec reject the chunk, ValueError if `out` is short.
    """
    group = group_of(key, layout)
    layout.check_tokens(num_tokens)
    plain, size = memoryview(chunk).cast("B"), layout.chunk_bytes(group, num_tokens)
    if len(plain) != size:
        raise LayoutError(
            f"a chunk of {len(plain)} bytes; {num_tokens} tokens of group {group} have {size}"
        )
    if (of_codec := arranged(codec, layout, group)) is None:
        raise LayoutError(f"codec {codec.name!r} does not accept group {group}")

    dtype, shape = layer_shape(layout, group, num_tokens)
    header_bytes = header_size(rank=len(shape), num_layers=layout.groups[group].layers, align=align)
    target = _target(codec, layout, group, num_tokens, align, out)
    payload = plain if target is None else target[header_bytes:]
    stated = checksums if codec.name == RAW else None
    if stated is not None and len(stated) != layout.groups[group].layers:
        raise LayoutError(
            f"{len(stated)} checksums for a chunk of {layout.groups[group].layers} layers"
        )
    tokens = _tokens(layout, group, of_codec, num_tokens)
    lengths, sums, end = [], [], 0
    if target is None and stated is not None:
        lengths, sums, end = [size // len(stated)] * len(stated), list(stated), size
    for layer in range(len(lengths), layout.groups[group].layers):
        start, length = layout.layer_range(group, layer, num_tokens)
        if target is not None:
            bytes_ = plain[start : start + length]
            if of_codec is not layout:
                bytes_ = to_canonical(bytes_, layout.groups[group])
            length = _encode_layer(codec, bytes_, payload[end:], of_codec, group, layer, tokens)
        lengths.append(length)
        sums.append(stated[layer] if stated is not None else checksum(payload[end : end + length]))
        end += length

    fields = FrameHeader(
        key=key,
        layout=layout.fingerprint,
        num_tokens=num_tokens,
        first_token=first_token,
        codec=codec.name,
        packing=layout.groups[group].packing,
        dtype=dtype,
        shape=shape,
        lengths=tuple(lengths),
        checksums=tuple(sums),
        header_bytes=header_bytes,
        expires_at=expires_at,
    )
    head = memoryview(encode_header(fields))
    if target is not None:
        target[:header_bytes] = head
        head = target[:header_bytes]
    return Frame(fields, head, payload[:end])


def unframe_chunk(
    frame: memoryview,
    into: memoryview,
    *,
    key: bytes,
    layout: Layout,
    num_tokens: int,
    first_token: int | None = None,
    find: FindCodec = find_codec,
) -> FrameHeader:
    """into: `layout.chunk_bytes(group, num_tokens)` bytes; undefined after a FrameError

    Raises FrameError, and ValueError for an `into` of the wrong size.
    """
    view = memoryview(frame).cast("B")
    header = read_header(view, frame_bytes=len(view))
    check_identity(header, key=key, layout=layout, num_tokens=num_tokens, first_token=first_token)
    unframe_payload(header, view[header.header_bytes :], into, layout=layout, find=find)
    return header


def unframe_payload(
    header: FrameHeader,
    payload: memoryview,
    into: memoryview,
    *,
    layout: Layout,
    find: FindCodec = find_codec,
) -> None:
    """Verify and decode all layers, after `check_identity`. Errors: see `unframe_chunk`."""
    view, target = memoryview(payload).cast("B"), memoryview(into).cast("B")
    if len(view) != header.payload_bytes:
        raise FrameError(
            "length", f"a payload of {len(view)} bytes; the header says {header.payload_bytes}"
        )
    size = header.layer_bytes
    if len(target) != size * len(header.lengths):
        raise ValueError(
            f"into has {len(target)} bytes, the chunk has {size * len(header.lengths)}"
        )
    for layer, (offset, length) in enumerate(zip(header.offsets, header.lengths, strict=True)):
        unframe_layer(
            header,
            layer,
            view[offset : offset + length],
            target[layer * size : (layer + 1) * size],
            layout=layout,
            find=find,
        )


def unframe_layer(
    header: FrameHeader,
    layer: int,
    encoded: memoryview,
    into: memoryview,
    *,
    layout: Layout,
    find: FindCodec = find_codec,
) -> None:
    """As `unframe_payload`. encoded: the bytes at `header.layer_range(layer)`"""
    source, target = memoryview(encoded).cast("B"), memoryview(into).cast("B")
    if len(target) != header.layer_bytes:
        raise ValueError(f"into has {len(target)} bytes, a layer has {header.layer_bytes}")
    codec, group = find(header.codec), group_of(header.key, layout)
    if codec is None or (of_codec := arranged(codec, layout, group)) is None:
        raise FrameError(
            "version", f"codec {header.codec!r} is unknown here, or rejects this layout"
        )
    verify_layer(header, layer, source)
    plain = target if of_codec is layout else memoryview(bytearray(len(target)))
    tokens = _tokens(layout, group, of_codec, header.num_tokens)
    codec.decode(source, plain, layout=of_codec, group=group, layer=layer, num_tokens=tokens)
    if plain is not target:
        from_canonical(plain, target, layout.groups[group])


def _target(
    codec: Codec, layout: Layout, group: int, num_tokens: int, align: int, out: memoryview | None
) -> memoryview | None:
    if out is None and codec.name == RAW:
        return None
    most = max_frame_bytes(codec, layout, group, num_tokens, align=align)
    if out is None:
        return memoryview(mmap(-1, most))
    if len(target := memoryview(out).cast("B")) < most:
        raise ValueError(f"out has {len(target)} bytes, the frame may need {most}")
    return target


def _encode_layer(
    codec: Codec,
    plain: memoryview,
    out: memoryview,
    layout: Layout,
    group: int,
    layer: int,
    num_tokens: int,
) -> int:
    most = codec.max_size(layout, group, num_tokens)
    length = index(
        codec.encode(
            plain, out[:most], layout=layout, group=group, layer=layer, num_tokens=num_tokens
        )
    )
    if not 0 <= length <= most:
        raise ValueError(
            f"codec {codec.name!r} reports {length} bytes for layer {layer}; it may use {most}"
        )
    return length
