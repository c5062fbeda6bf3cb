"""The only format of chunks outside the arena (docs/format.md).

Checksums find accidents, not forgeries. Any thread; xxhash releases the GIL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from struct import Struct, pack, unpack_from
from typing import TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from kvhold.core.errors import FrameError, FrameReason, LayoutError
from kvhold.core.keys import KEY_BYTES
from kvhold.core.layout import CANONICAL, DTYPE_BYTES, MOST_CHUNK_BYTES, Layout

Buffer: TypeAlias = bytes | bytearray | memoryview

# broken by transfers of text
MAGIC = b"\x89kvhold\n"
VERSION = 1
RAW = "raw"
PREFIX_BYTES = 24
ALIGNMENT = 64

MAX_RANK = 8
MAX_LAYERS = 4096
MAX_HEADER_BYTES = 1 << 17
MAX_CHUNK_BYTES = MOST_CHUNK_BYTES
CODEC_BYTES = 16
PACKING_BYTES = 32

_PREFIX = Struct("<8sHHIQ")  # magic, version, flags, header_bytes, payload_bytes
_FIXED = Struct("<16s40sqIIQ16s16s32sQQ")
_SHAPE_AT = PREFIX_BYTES + _FIXED.size
_ROW_BYTES = 24  # offset, length, checksum
_CHECKSUM = Struct("<Q")
_INT64, _UINT32, _UINT64 = 1 << 63, 1 << 32, 1 << 64


@dataclass(frozen=True)
class FrameSize:
    """Within bounds, but not verified."""

    header_bytes: int
    payload_bytes: int


@dataclass(frozen=True)
class FrameHeader:
    """first_token: its position in the prompt; K is rotated for it
    packing: CANONICAL: `shape` is [planes, tokens, heads, head_dim], else [blocks, block_bytes]
    lengths: [layers] bytes of encoded layers, end to end in the payload
    checksums: [layers] xxh3_64 of encoded layers
    """

    key: bytes
    layout: bytes
    num_tokens: int
    first_token: int
    codec: str
    packing: str
    dtype: str
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    checksums: tuple[int, ...]
    header_bytes: int
    expires_at: int = 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @property
    def payload_bytes(self) -> int:
        return sum(self.lengths)

    @property
    def frame_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes

    @property
    def layer_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def layer_range(self, layer: int) -> tuple[int, int]:
        return self.header_bytes + self.offsets[layer], self.lengths[layer]


def layer_shape(layout: Layout, group: int, num_tokens: int) -> tuple[str, tuple[int, ...]]:
    """`(dtype, shape)`; uint8 for an opaque packing."""
    place = layout.groups[group]
    if place.packing == CANONICAL:
        return place.dtype, (place.planes, num_tokens, place.heads, place.head_dim)
    return "uint8", (place.layer_bytes(num_tokens) // place.block_bytes, place.block_bytes)


def header_size(*, rank: int, num_layers: int, align: int = ALIGNMENT) -> int:
    """Raises ValueError unless `align` is a multiple of 8."""
    if align < 8 or align % 8:
        raise ValueError(f"align is {align}; it must be a multiple of 8")
    least = _SHAPE_AT + 8 * rank + _ROW_BYTES * num_layers + _CHECKSUM.size
    return -(-least // align) * align


def group_of(key: bytes, layout: Layout) -> int:
    """Raises ValueError, or LayoutError for an unknown group."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this has {len(key)}")
    group = int.from_bytes(key[-4:-2], "little")
    if group >= len(layout.groups):
        raise LayoutError(f"the key names group {group}, the layout has {len(layout.groups)}")
    return group


def checksum(data: Buffer) -> int:
    return xxh3_64_intdigest(data)


def encode_header(header: FrameHeader) -> bytes:
    """Raises ValueError if no reader would accept the header."""
    if fault := _fault(header):
        raise ValueError(f"not a frame's header: {fault[1]}")
    table = [0] * (3 * len(header.lengths))
    table[0::3], table[1::3], table[2::3] = header.offsets, header.lengths, header.checksums
    numbers = (*header.shape, *table)
    head = b"".join(
        (
            _PREFIX.pack(MAGIC, VERSION, 0, header.header_bytes, header.payload_bytes),
            _FIXED.pack(
                header.layout,
                header.key,
                header.first_token,
                header.num_tokens,
                len(header.lengths),
                header.layer_bytes,
                header.codec.encode(),
                header.dtype.encode(),
                header.packing.encode(),
                header.expires_at,
                len(header.shape),
            ),
            pack(f"<{len(numbers)}Q", *numbers),
        )
    ).ljust(header.header_bytes - _CHECKSUM.size, b"\0")
    return head + _CHECKSUM.pack(checksum(head))


def read_size(prefix: Buffer) -> FrameSize:
    """prefix: a frame's first PREFIX_BYTES. Raises FrameError."""
    if len(prefix) < PREFIX_BYTES:
        raise FrameError("length", f"{len(prefix)} bytes; a frame begins with {PREFIX_BYTES}")
    magic, version, flags, header_bytes, payload_bytes = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise FrameError("magic", f"it begins with {bytes(prefix[: len(MAGIC)]).hex()}")
    if version != VERSION:
        raise FrameError("version", f"version {version}; this reader knows {VERSION}")
    if flags:
        raise FrameError("version", f"flags {flags:#06x}; version {VERSION} has none")
    if (
        not header_size(rank=1, num_layers=1, align=8) <= header_bytes <= MAX_HEADER_BYTES
        or header_bytes % 8
    ):
        raise FrameError("length", f"a header of {header_bytes} bytes")
    if payload_bytes > MAX_CHUNK_BYTES:
        raise FrameError("length", f"a payload of {payload_bytes} bytes; at most {MAX_CHUNK_BYTES}")
    return FrameSize(header_bytes, payload_bytes)


def read_header(buffer: Buffer, *, frame_bytes: int | None = None) -> FrameHeader:
    """buffer: the whole header, at least
    frame_bytes: the frame's size, if known, to detect a truncated or padded frame

    Raises FrameError.
    """
    view = memoryview(buffer).cast("B")
    size = read_size(view[:PREFIX_BYTES])
    if frame_bytes is not None and frame_bytes != size.header_bytes + size.payload_bytes:
        raise FrameError(
            "length",
            f"{frame_bytes} bytes; header and payload are {size.header_bytes} and "
            f"{size.payload_bytes}",
        )
    if len(view) < size.header_bytes:
        raise FrameError("length", f"{len(view)} bytes of a header of {size.header_bytes}")
    end = size.header_bytes - _CHECKSUM.size
    if _CHECKSUM.unpack_from(view, end)[0] != checksum(view[:end]):
        raise FrameError("checksum", "of the header")

    (
        layout,
        key,
        first_token,
        num_tokens,
        num_layers,
        layer_bytes,
        codec,
        dtype,
        packing,
        expires_at,
        rank,
    ) = _FIXED.unpack_from(view, PREFIX_BYTES)
    table_at = _SHAPE_AT + 8 * rank
    table_end = table_at + _ROW_BYTES * num_layers
    if table_end > end:
        raise FrameError(
            "length",
            f"a header of {size.header_bytes} bytes with rank {rank} and {num_layers} layers",
        )
    if bytes(view[table_end:end]).strip(b"\0"):
        raise FrameError("length", "the header's padding is not zero")
    numbers = unpack_from(f"<{rank + 3 * num_layers}Q", view, _SHAPE_AT)
    header = FrameHeader(
        key=key,
        layout=layout,
        num_tokens=num_tokens,
        first_token=first_token,
        codec=_text(codec),
        packing=_text(packing),
        dtype=_text(dtype),
        shape=numbers[:rank],
        lengths=numbers[rank + 1 :: 3],
        checksums=numbers[rank + 2 :: 3],
        header_bytes=size.header_bytes,
        expires_at=expires_at,
    )
    if fault := _fault(header):
        raise FrameError(*fault)
    if layer_bytes != header.layer_bytes:
        raise FrameError(
            "length",
            f"layers of {layer_bytes} bytes; {header.dtype} {list(header.shape)} has "
            f"{header.layer_bytes}",
        )
    if numbers[rank::3] != header.offsets or size.payload_bytes != header.payload_bytes:
        raise FrameError(
            "length", f"the layers do not lie end to end in a payload of {size.payload_bytes} bytes"
        )
    return header


def check_identity(
    header: FrameHeader,
    *,
    key: bytes,
    layout: Layout,
    num_tokens: int,
    first_token: int | None = None,
) -> None:
    """Raise FrameError("identity") unless `header` describes the requested chunk."""
    group = group_of(key, layout)
    if header.key != key:
        raise FrameError("identity", f"the key is {header.key.hex()}, not {key.hex()}")
    if header.layout != layout.fingerprint:
        raise FrameError(
            "identity", f"the layout is {header.layout.hex()}, not {layout.fingerprint.hex()}"
        )
    if header.num_tokens != num_tokens:
        raise FrameError("identity", f"{header.num_tokens} tokens, not {num_tokens}")
    if first_token is not None and header.first_token != first_token:
        raise FrameError("identity", f"the first token is {header.first_token}, not {first_token}")
    found = (len(header.lengths), header.packing, header.dtype, header.shape)
    expected = (
        layout.groups[group].layers,
        layout.groups[group].packing,
        *layer_shape(layout, group, num_tokens),
    )
    if found != expected:
        raise FrameError(
            "identity", f"layers, packing, dtype and shape are {found}, the layout has {expected}"
        )


def verify_layer(header: FrameHeader, layer: int, encoded: Buffer) -> None:
    """Raise FrameError for another length or checksum than this layer's."""
    if len(encoded) != header.lengths[layer]:
        raise FrameError(
            "length", f"layer {layer} is {len(encoded)} bytes of {header.lengths[layer]}"
        )
    if checksum(encoded) != header.checksums[layer]:
        raise FrameError("checksum", f"of layer {layer}")


def verify(header: FrameHeader, payload: Buffer) -> None:
    """Raise FrameError unless all layers of `payload` match the header."""
    view = memoryview(payload).cast("B")
    if len(view) != header.payload_bytes:
        raise FrameError(
            "length", f"a payload of {len(view)} bytes; the header says {header.payload_bytes}"
        )
    for layer, (offset, length) in enumerate(zip(header.offsets, header.lengths, strict=True)):
        verify_layer(header, layer, view[offset : offset + length])


class RunningChecksums:
    """Of the layers of a raw frame that arrives in order."""

    def __init__(self, header_bytes: int, layer_bytes: int) -> None:
        self._skip = header_bytes
        self._size = self._left = layer_bytes
        self._begun = xxh3_64()
        self.layers: list[int] = []

    def add(self, piece: memoryview) -> None:
        at = min(self._skip, piece.nbytes)
        self._skip -= at
        while at < piece.nbytes:
            some = piece[at : at + self._left]
            at += some.nbytes
            if some.nbytes == self._size:
                self.layers.append(checksum(some))
                continue
            self._begun.update(some)
            self._left -= some.nbytes
            if not self._left:
                self.layers.append(self._begun.intdigest())
                self._begun.reset()
                self._left = self._size


def _fault(header: FrameHeader) -> tuple[FrameReason, str] | None:
    if (
        not header.num_tokens
        or not 0 <= header.first_token < _INT64
        or not header.num_tokens < _UINT32
    ):
        return "length", f"{header.num_tokens} tokens from {header.first_token} on"
    if not 0 <= header.expires_at < _INT64:
        return "length", f"it expires at {header.expires_at}"
    if header.dtype not in DTYPE_BYTES:
        return "version", f"dtype {header.dtype!r} is unknown"
    if not _is_name(header.codec, CODEC_BYTES) or not _is_name(header.packing, PACKING_BYTES):
        return (
            "version",
            (
                f"codec {header.codec!r}, packing {header.packing!r}; names are visible ASCII, "
                f"{CODEC_BYTES} and {PACKING_BYTES} bytes"
            ),
        )
    if len(header.key) != KEY_BYTES or len(header.layout) != 16:
        return "length", f"key and layout have {len(header.key)} and {len(header.layout)} bytes"
    return _fault_of_sizes(header)


def _fault_of_sizes(header: FrameHeader) -> tuple[FrameReason, str] | None:
    layers, rank = len(header.lengths), len(header.shape)
    if (
        not 1 <= rank <= MAX_RANK
        or not 1 <= layers <= MAX_LAYERS
        or layers != len(header.checksums)
    ):
        return "length", f"rank {rank}, {layers} layers, {len(header.checksums)} checksums"
    if min(header.shape) < 1 or layers * header.layer_bytes > MAX_CHUNK_BYTES:
        return "length", f"{layers} layers of {header.dtype} {list(header.shape)}"
    if (
        min(header.lengths) < 0
        or header.payload_bytes > MAX_CHUNK_BYTES
        or not _fit(header.checksums)
    ):
        return "length", f"a payload of {header.payload_bytes} bytes"
    if header.codec == RAW and header.lengths.count(header.layer_bytes) != layers:
        return "length", f"raw layers are {header.layer_bytes} bytes each"
    if (
        not header_size(rank=rank, num_layers=layers, align=8)
        <= header.header_bytes
        <= MAX_HEADER_BYTES
        or header.header_bytes % 8
    ):
        return (
            "length",
            f"a header of {header.header_bytes} bytes with rank {rank} and {layers} layers",
        )
    return None


def _fit(numbers: Sequence[int]) -> bool:
    return min(numbers) >= 0 and max(numbers) < _UINT64


def _is_name(text: str, most: int) -> bool:
    return 1 <= len(text) <= most and text.isascii() and text.isprintable() and " " not in text


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")
