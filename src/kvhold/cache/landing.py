"""Chunks of the arena as frames, and frames on their way into it: without a copy where the payload is raw.

    parts = framed(entry, layout, ram.view(entry))          # down: what a tier writes
    landing = Landing.of(ram, arrival)                      # up: a tier reads into landing.parts, unseen memory
    landing.accept(nbytes)                                  # checked, every byte of it, or FrameError

Any thread; hashing and copying release the GIL.
"""

from kvhold.cache.orders import Arrival
from kvhold.codecs import Raw, check_identity, frame_chunk, header_size, max_frame_bytes, read_header, unframe_chunk, verify
from kvhold.codecs.frame import layer_shape
from kvhold.core.layout import Layout
from kvhold.memory.pages import page_aligned
from kvhold.memory.slab import ALIGNMENT
from kvhold.tiers.base import Parts
from kvhold.tiers.ram import Entry, RamTier

_RAW = Raw()


class Landing:
    """Where one value lands: its header in memory of its own, a raw payload in the arena; a frame of another size as a whole beside it."""

    def __init__(self, arrival: Arrival, chunk: memoryview, parts: Parts) -> None:
        self.arrival = arrival
        self.parts = parts
        self._chunk = chunk

    @classmethod
    def of(cls, ram: RamTier, arrival: Arrival) -> "Landing":
        """For one arrival, into the memory of its entry."""
        entry, layout = arrival.entry, arrival.layout
        chunk = ram.view(entry)
        header_bytes = _header_bytes(entry, layout)
        if arrival.place.nbytes == header_bytes + entry.nbytes:
            return cls(arrival, chunk, (page_aligned(header_bytes), chunk))
        most = max_frame_bytes(_RAW, layout, _group(entry), entry.num_tokens, align=ALIGNMENT)
        # What is larger than that does not fit: a miss. Nothing at all is a frame that is cut short, like any other.
        return cls(arrival, chunk, (page_aligned(max(1, min(arrival.place.nbytes, 2 * most))),))

    def accept(self, nbytes: int, *, check: bool) -> int:
        """Check what arrived, all of it, and have the chunk in the arena. Returns when it expires. Raises FrameError."""
        entry, layout = self.arrival.entry, self.arrival.layout
        if len(self.parts) == 1:
            frame = self.parts[0][:nbytes]
            header = unframe_chunk(
                frame, self._chunk, key=entry.key, layout=layout, num_tokens=entry.num_tokens, first_token=entry.first_token
            )
            return header.expires_at
        header = read_header(self.parts[0], frame_bytes=nbytes)
        check_identity(header, key=entry.key, layout=layout, num_tokens=entry.num_tokens, first_token=entry.first_token)
        if header.codec != _RAW.name or header.header_bytes != len(self.parts[0]):
            whole = memoryview(b"".join(self.parts))
            unframe_chunk(whole, self._chunk, key=entry.key, layout=layout, num_tokens=entry.num_tokens, first_token=entry.first_token)
        elif check:
            verify(header, self._chunk)
        return header.expires_at


def framed(entry: Entry, layout: Layout, view: memoryview) -> Parts:
    """Header and payload of an entry, the payload where it lies (`view`) and the header at a page's beginning, as direct I/O wants."""
    frame = frame_chunk(
        view,
        _RAW,
        key=entry.key,
        layout=layout,
        num_tokens=entry.num_tokens,
        first_token=entry.first_token,
        expires_at=entry.expires_at,
        align=ALIGNMENT,
    )
    header = page_aligned(len(frame.header))
    header[:] = frame.header
    return header, frame.payload


def _header_bytes(entry: Entry, layout: Layout) -> int:
    group = _group(entry)
    return header_size(rank=len(layer_shape(layout, group, entry.num_tokens)[1]), num_layers=layout.groups[group].layers, align=ALIGNMENT)


def _group(entry: Entry) -> int:
    return int.from_bytes(entry.key[-4:-2], "little")
