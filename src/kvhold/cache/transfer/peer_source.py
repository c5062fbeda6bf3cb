"""Lends chunks to peers: pinned in memory, or read from this node's disks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeAlias

from kvhold.cache.state import CacheState
from kvhold.codecs import Raw, frame_chunk, header_size
from kvhold.codecs.frame import group_of, layer_shape
from kvhold.core.checksums import unpack
from kvhold.core.errors import LayoutError
from kvhold.core.layout import Layout
from kvhold.memory.slab import ALIGNMENT
from kvhold.tiers.base import Parts
from kvhold.tiers.ram import Entry

ReadDisks: TypeAlias = Callable[[Sequence[bytes], Sequence[int]], "Future[list[Parts | None]]"]
_Held = list[tuple[Entry, Layout] | None]
_RAW = Raw()


class PeerSource:
    def __init__(self, state: CacheState, post: Callable[[Callable[[], None]], None]) -> None:
        self.read_disks: ReadDisks | None = None
        """Set before any call, unless there are no disks."""
        self._state = state
        self._post = post

    @asynccontextmanager
    async def lent(
        self, keys: Sequence[bytes], room: Sequence[int]
    ) -> AsyncIterator[list[Parts | None]]:
        held = await self._hold(keys)
        try:
            frames = [
                None if one is None else self._framed(*one, most)
                for one, most in zip(held, room, strict=True)
            ]
            missing = [at for at, one in enumerate(held) if one is None]
            # a frame that is not lent pins no chunk
            pairs = list(zip(held, frames, strict=True))
            held = [one if frame is not None else None for one, frame in pairs]
            self._let_go([one if frame is None else None for one, frame in pairs])
            await self._add_from_disks(frames, missing, keys, room)
            yield frames
        finally:
            self._let_go(held)

    def frame_size(self, key: bytes, nbytes: int, num_tokens: int) -> int:
        """Any thread."""
        layout = self._state.layout_of(key)
        try:
            return 0 if layout is None else nbytes + _header_bytes(key, layout, num_tokens)
        except LayoutError:
            return 0

    async def _add_from_disks(
        self,
        frames: list[Parts | None],
        missing: Sequence[int],
        keys: Sequence[bytes],
        room: Sequence[int],
    ) -> None:
        if missing and self.read_disks is not None:
            reading = self.read_disks([keys[at] for at in missing], [room[at] for at in missing])
            found: list[Parts | None] = await asyncio.wrap_future(reading)
            for at, frame in zip(missing, found, strict=True):
                frames[at] = frame

    def _framed(self, entry: Entry, layout: Layout, most: int) -> Parts | None:
        if entry.nbytes + _header_bytes(entry.key, layout, entry.num_tokens) > most:
            return None
        return frame_chunk(
            self._state.ram.view(entry),
            _RAW,
            key=entry.key,
            layout=layout,
            num_tokens=entry.num_tokens,
            first_token=entry.first_token,
            expires_at=entry.expires_at,
            checksums=unpack(entry.checksums) or None,
            align=ALIGNMENT,
        ).parts

    async def _hold(self, keys: Sequence[bytes]) -> _Held:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Held] = loop.create_future()

        def deliver(held: _Held) -> None:
            if answer.done():
                self._let_go(held)
            else:
                answer.set_result(held)

        def hold() -> None:
            held = self._state.hold_for_peer(keys)
            try:
                loop.call_soon_threadsafe(deliver, held)
            except RuntimeError:
                self._release(held)

        self._post(hold)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                self._let_go(answer.result())
            raise

    def _let_go(self, held: _Held) -> None:
        if any(one is not None for one in held):
            self._post(lambda: self._release(held))

    def _release(self, held: _Held) -> None:
        self._state.ram.unpin_all(one[0] for one in held if one is not None)


def _header_bytes(key: bytes, layout: Layout, num_tokens: int) -> int:
    group = group_of(key, layout)
    return header_size(
        rank=len(layer_shape(layout, group, num_tokens)[1]),
        num_layers=layout.groups[group].layers,
        align=ALIGNMENT,
    )
