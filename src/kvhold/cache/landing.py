"""Chunks of the arena as frames, and frames on their way into it: without a copy where the payload is raw and in the clear.

    writer = Writer(make_codec("lossless"), keyring)
    written = writer.framed(entry, layout, ram.view(entry), terms)     # down: written.parts are what a tier writes
    landing = Landing.of(ram, arrival, keyring)                        # up: a tier reads into landing.parts, unseen memory
    landing.accept(nbytes)                                             # decrypted, checked, every byte of it, decoded; or FrameError

Any thread; hashing, coding and copying release the GIL.
"""

from dataclasses import dataclass

from kvhold.cache.orders import Arrival
from kvhold.codecs import Codec, Raw, check_identity, frame_within, header_size, max_frame_bytes, read_header, unframe_chunk, verify
from kvhold.codecs.frame import layer_shape
from kvhold.codecs.sealing import OVERHEAD_BYTES, Keyring
from kvhold.core.layout import Layout
from kvhold.core.terms import Terms
from kvhold.memory.pages import page_aligned
from kvhold.memory.slab import ALIGNMENT
from kvhold.tiers.base import Parts
from kvhold.tiers.ram import Entry, RamTier

_RAW = Raw()


class Landing:
    """Where one value lands: its header in memory of its own, a raw payload in the arena; a frame of another size as a whole beside it."""

    def __init__(self, arrival: Arrival, chunk: memoryview, parts: Parts, keyring: Keyring | None) -> None:
        self.arrival = arrival
        self.parts = parts
        self._chunk = chunk
        self._keyring = keyring

    @classmethod
    def of(cls, ram: RamTier, arrival: Arrival, keyring: Keyring | None = None) -> "Landing":
        """For one arrival, into the memory of its entry. keyring: of a tier that is encrypted; there, what is not sealed is no frame."""
        entry, layout = arrival.entry, arrival.layout
        chunk = ram.view(entry)
        header_bytes = _header_bytes(entry, layout)
        if keyring is None and arrival.place.nbytes == header_bytes + entry.nbytes:
            return cls(arrival, chunk, (page_aligned(header_bytes), chunk), None)
        most = max_frame_bytes(_RAW, layout, _group(entry), entry.num_tokens, align=ALIGNMENT)
        # What is larger than that does not fit: a miss. Nothing at all is a frame that is cut short, like any other.
        return cls(arrival, chunk, (page_aligned(max(1, min(arrival.place.nbytes, 2 * most + OVERHEAD_BYTES))),), keyring)

    def accept(self, nbytes: int, *, check: bool) -> int:
        """Check what arrived, all of it, and have the chunk in the arena. Returns when it expires. Raises FrameError."""
        entry, layout = self.arrival.entry, self.arrival.layout
        if len(self.parts) == 1:
            frame = self.parts[0][:nbytes]
            if self._keyring is not None:
                frame = self._keyring.unseal(frame, key=entry.key, tenant=self.arrival.tenant)
            header = unframe_chunk(
                frame, self._chunk, key=entry.key, layout=layout, num_tokens=entry.num_tokens, first_token=entry.first_token
            )
            return header.expires_at
        header = read_header(self.parts[0], frame_bytes=nbytes)
        check_identity(header, key=entry.key, layout=layout, num_tokens=entry.num_tokens, first_token=entry.first_token)
        if header.codec != _RAW.name or header.header_bytes != len(self.parts[0]):
            whole = memoryview(b"".join(self.parts))[:nbytes]  # another frame has taken the place of the one that was probed
            unframe_chunk(whole, self._chunk, key=entry.key, layout=layout, num_tokens=entry.num_tokens, first_token=entry.first_token)
        elif check:
            verify(header, self._chunk)
        return header.expires_at


@dataclass(frozen=True)
class Written:
    """What a tier is given for one chunk. nbytes: of the frame; codec: which one it was in the end."""

    parts: Parts
    nbytes: int
    codec: str


@dataclass(frozen=True)
class Writer:
    """How a tier's frames are made. keyring: None where it is not encrypted."""

    codec: Codec
    keyring: Keyring | None = None

    def framed(self, entry: Entry, layout: Layout, view: memoryview, terms: Terms) -> Written | None:
        """Header and payload of an entry, a raw payload where it lies (`view`), the header at a page's beginning, as direct I/O wants.

        None where it must be encrypted and there is no key for it.
        """
        return self.encoded(
            view,
            layout,
            terms,
            key=entry.key,
            num_tokens=entry.num_tokens,
            first_token=entry.first_token,
            expires_at=entry.expires_at,
        )

    def encoded(
        self, chunk: memoryview, layout: Layout, terms: Terms, *, key: bytes, num_tokens: int, first_token: int, expires_at: int
    ) -> Written | None:
        """The same of a chunk that is no entry."""
        if self.keyring is not None and not self.keyring.seals(terms.tenant):
            return None
        frame = frame_within(
            chunk,
            self.codec,
            terms,
            key=key,
            layout=layout,
            num_tokens=num_tokens,
            first_token=first_token,
            expires_at=expires_at,
            align=ALIGNMENT,
        )
        parts = frame.parts if self.keyring is None else self.keyring.seal(frame.parts, key=key, tenant=terms.tenant)
        return Written(_on_a_page(parts), sum(part.nbytes for part in parts), frame.fields.codec)


def _on_a_page(parts: Parts) -> Parts:
    """A raw frame's header is bytes of its own, anywhere; what was coded or sealed begins at a page already."""
    if len(parts) == 1 or parts[0].obj is parts[1].obj:
        return parts
    header = page_aligned(len(parts[0]))
    header[:] = parts[0]
    return header, parts[1]


def _header_bytes(entry: Entry, layout: Layout) -> int:
    group = _group(entry)
    return header_size(rank=len(layer_shape(layout, group, entry.num_tokens)[1]), num_layers=layout.groups[group].layers, align=ALIGNMENT)


def _group(entry: Entry) -> int:
    return int.from_bytes(entry.key[-4:-2], "little")
