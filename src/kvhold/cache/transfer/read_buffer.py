"""Receives a tier's frame, checks it and decodes it into the arena.

Any thread; the work releases the GIL.
"""

from collections.abc import Callable

from kvhold.cache.transfer.commands import PendingRead
from kvhold.codecs import (
    Raw,
    RunningChecksums,
    check_identity,
    check_loss,
    header_size,
    max_frame_bytes,
    read_header,
    unframe_layer,
    unframe_payload,
    verify,
)
from kvhold.codecs.frame import RAW, FrameHeader, checksum, layer_shape
from kvhold.codecs.sealing import OVERHEAD_BYTES, Keyring
from kvhold.core.checksums import pack
from kvhold.core.errors import FrameError
from kvhold.core.layout import Layout
from kvhold.memory.pages import page_aligned
from kvhold.memory.slab import ALIGNMENT
from kvhold.tiers.base import Parts, WatchedParts
from kvhold.tiers.ram import Entry, RamTier

_RAW = Raw()


class ReadBuffer:
    """One read's buffers. A raw, unencrypted payload goes directly to the arena."""

    def __init__(
        self, pending_read: PendingRead, chunk: memoryview, parts: Parts, keyring: Keyring | None
    ) -> None:
        self.pending_read = pending_read
        self.parts = parts
        self._chunk = chunk
        self._keyring = keyring
        self._sums: _ArrivingSums | None = None
        if isinstance(parts, WatchedParts):
            layer_bytes = pending_read.entry.nbytes // self._num_layers
            self._sums = _ArrivingSums(parts[0].nbytes, layer_bytes)
            parts.begin = self._sums.begin

    @classmethod
    def of(
        cls, ram: RamTier, pending_read: PendingRead, keyring: Keyring | None = None
    ) -> "ReadBuffer":
        """keyring: of an encrypted tier, whose unencrypted values are refused"""
        entry, layout = pending_read.entry, pending_read.layout
        chunk = ram.view(entry)
        if layout is None:
            return cls(pending_read, chunk, (chunk,), None)
        header_bytes = _header_bytes(entry, layout)
        if keyring is None and pending_read.place.nbytes == header_bytes + entry.nbytes:
            parts = WatchedParts((page_aligned(header_bytes), chunk))
            return cls(pending_read, chunk, parts, None)
        most = max_frame_bytes(_RAW, layout, _group(entry), entry.num_tokens, align=ALIGNMENT)
        # a larger value is a miss; an empty one is truncated
        return cls(
            pending_read,
            chunk,
            (page_aligned(max(1, min(pending_read.place.nbytes, 2 * most + OVERHEAD_BYTES))),),
            keyring,
        )

    def fits(self, nbytes: int) -> bool:
        entry = self.pending_read.entry
        return self.pending_read.layout is not None or nbytes == entry.nbytes

    @property
    def is_summed(self) -> bool:
        """The chunk was checked as it arrived."""
        return self._sums is not None and len(self._sums.layers) == self._num_layers

    @property
    def _num_layers(self) -> int:
        layout = self.pending_read.layout
        assert layout is not None, "the chunk is no opaque frame"
        return layout.groups[_group(self.pending_read.entry)].layers

    def accept(self, nbytes: int, *, check: bool) -> int:
        """Returns the expiry; 0: never. Raises FrameError."""
        entry, layout = self.pending_read.entry, self.pending_read.layout
        if layout is None:
            return 0
        frame = self.parts[0][:nbytes] if len(self.parts) == 1 else self.parts[0]
        if self._keyring is not None:
            frame = self._keyring.unseal(frame, key=entry.key, tenant=self.pending_read.tenant)
        header = read_header(frame, frame_bytes=len(frame) if len(self.parts) == 1 else nbytes)
        check_identity(
            header,
            key=entry.key,
            layout=layout,
            num_tokens=entry.num_tokens,
            first_token=entry.first_token,
        )
        check_loss(header)
        in_place = (
            len(self.parts) == 2 and header.codec == RAW and header.header_bytes == len(frame)
        )
        if not in_place:
            if len(self.parts) == 2:
                frame = memoryview(b"".join(self.parts))[:nbytes]
            entry.checksums = pack(
                _decode(header, frame[header.header_bytes :], self._chunk, layout)
            )
            return header.expires_at
        if check:
            self._verify(header)
        entry.checksums = pack(header.checksums)
        return header.expires_at

    def _verify(self, header: FrameHeader) -> None:
        if self._sums is None or not self.is_summed:
            verify(header, self._chunk)
        elif tuple(self._sums.layers) != header.checksums:
            raise FrameError("checksum", "of a layer")


class _ArrivingSums:
    """No part of a cycle: a node collects none."""

    def __init__(self, header_bytes: int, layer_bytes: int) -> None:
        self._sizes = header_bytes, layer_bytes
        self.layers: list[int] = []

    def begin(self) -> Callable[[memoryview], None]:
        running = RunningChecksums(*self._sizes)
        self.layers = running.layers
        return running.add


def _decode(
    header: FrameHeader, payload: memoryview, chunk: memoryview, layout: Layout
) -> list[int]:
    """Checksums are computed outside the arena, where no other process writes."""
    size = header.layer_bytes
    if header.codec == RAW:
        unframe_payload(header, payload, chunk, layout=layout)
        return list(header.checksums)
    layer_bytes, checksums = memoryview(bytearray(size)), []
    for layer, (offset, length) in enumerate(zip(header.offsets, header.lengths, strict=True)):
        unframe_layer(header, layer, payload[offset : offset + length], layer_bytes, layout=layout)
        checksums.append(checksum(layer_bytes))
        chunk[layer * size : (layer + 1) * size] = layer_bytes
    return checksums


def _header_bytes(entry: Entry, layout: Layout) -> int:
    group = _group(entry)
    return header_size(
        rank=len(layer_shape(layout, group, entry.num_tokens)[1]),
        num_layers=layout.groups[group].layers,
        align=ALIGNMENT,
    )


def _group(entry: Entry) -> int:
    return int.from_bytes(entry.key[-4:-2], "little")
