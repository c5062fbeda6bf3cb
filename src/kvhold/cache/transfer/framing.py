"""Encodes and encrypts chunks for tiers. Any thread; the work releases the GIL."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold.codecs import Codec, frame_within
from kvhold.codecs.frame import RAW, checksum
from kvhold.codecs.sealing import Keyring
from kvhold.core.checksums import unpack
from kvhold.core.errors import DamagedChunks
from kvhold.core.layout import Layout
from kvhold.core.store_options import StoreOptions
from kvhold.memory.pages import page_aligned
from kvhold.memory.slab import ALIGNMENT
from kvhold.tiers.base import Parts
from kvhold.tiers.ram import Entry


@dataclass(frozen=True)
class Framed:
    parts: Parts
    nbytes: int
    codec: str


@dataclass(frozen=True)
class Framer:
    codec: Codec
    keyring: Keyring | None = None

    def framed(
        self, entry: Entry, layout: Layout, view: memoryview, store_options: StoreOptions
    ) -> Framed | None:
        """None: no encryption key. Raises DamagedChunks.

        A raw frame has the checksums of the commit. Other chunks are checked after encoding.
        """
        checksums = unpack(entry.checksums) or None
        written = self.encoded(
            view,
            layout,
            store_options,
            key=entry.key,
            num_tokens=entry.num_tokens,
            first_token=entry.first_token,
            expires_at=entry.expires_at,
            checksums=checksums,
        )
        if written is not None and checksums is not None and written.codec != RAW:
            size = len(view) // len(checksums)
            if any(
                checksum(view[layer * size : (layer + 1) * size]) != stated
                for layer, stated in enumerate(checksums)
            ):
                raise DamagedChunks([0])
        return written

    def encoded(
        self,
        chunk: memoryview,
        layout: Layout,
        store_options: StoreOptions,
        *,
        key: bytes,
        num_tokens: int,
        first_token: int,
        expires_at: int,
        checksums: Sequence[int] | None = None,
    ) -> Framed | None:
        if self.keyring is not None and not self.keyring.seals(store_options.tenant):
            return None
        frame = frame_within(
            chunk,
            self.codec,
            store_options,
            key=key,
            layout=layout,
            num_tokens=num_tokens,
            first_token=first_token,
            expires_at=expires_at,
            checksums=checksums,
            align=ALIGNMENT,
        )
        parts = (
            frame.parts
            if self.keyring is None
            else self.keyring.seal(frame.parts, key=key, tenant=store_options.tenant)
        )
        return Framed(on_a_page(parts), sum(part.nbytes for part in parts), frame.fields.codec)


def on_a_page(parts: Parts) -> Parts:
    if len(parts) == 1 or parts[0].obj is parts[1].obj:
        return parts
    header = page_aligned(len(parts[0]))
    header[:] = parts[0]
    return header, parts[1]
