"""Follows one peer: a snapshot, then its changes, into the index (docs/peers.md).

After a lost connection or a gap: the next change if the peer still has it, else a snapshot.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from kvhold.core.errors import ProtocolError, TierError
from kvhold.core.turns import next_turn
from kvhold.net import login
from kvhold.net import peers as p
from kvhold.net.stream import Stream
from kvhold.net.wire import Decoder, encode
from kvhold.tiers.calls import now
from kvhold.tiers.exchanges import read_body
from kvhold.tiers.peers.bus import SILENT_S, Inbox, Inboxes
from kvhold.tiers.peers.channel import NIXL
from kvhold.tiers.peers.clear_numbers import ClearNumbers, keep
from kvhold.tiers.peers.faults import PeerFault
from kvhold.tiers.peers.index import PeerIndex, unpack
from kvhold.tiers.peers.peer import Peer

log = logging.getLogger(__name__)

_LEAST_BUS_PAUSE_S, _LONGEST_BUS_PAUSE_S = 1.0, 60.0  # after the bus failed
_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MOST_VERSION, _MOST_NAME = 40, 64
_AT_ONCE = 500  # changes between two turns of the loop
_news: Decoder[p.News] = Decoder(p.News)


class Follower:
    def __init__(
        self,
        peer: Peer,
        index: PeerIndex,
        numbers: ClearNumbers,
        *,
        most_chunks: int,
        forget_s: float,
        own_incarnation: Callable[[], int],
        is_followed_elsewhere: Callable[[int], bool],
        learned: Callable[[bytes], None],
        inboxes: Inboxes | None = None,
    ) -> None:
        """is_followed_elsewhere: an incarnation is followed at another of its addresses
        learned: called with each namespace that a peer has cleared, b"" means all
        """
        self._peer = peer
        self._index = index
        self._numbers = numbers
        self._most_chunks = most_chunks
        self._forget_s = forget_s
        self._own_incarnation = own_incarnation
        self._is_followed_elsewhere = is_followed_elsewhere
        self._learned = learned
        self._inboxes = inboxes
        self._inbox: Inbox | None = None
        self._bus_pause_s = _LEAST_BUS_PAUSE_S
        self._bus_from_s = 0.0
        self._told = ""

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._use_inbox(None)

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            fault = await self._follow_once()
            if self._peer.is_followed:
                pause_s = _FIRST_PAUSE_S
                self._peer.lost_s = now()
            elif self._peer.lost_s is None and self._index.count(self._peer.number):
                self._peer.lost_s = now()
            if fault is not None:
                self._peer.changed_state(away_for=fault)
                self._peer.record.failed(fault)
                if str(fault) != self._told:
                    self._told = str(fault)
                    log.warning("%s", fault)
            self._peer.tried.set()
            if self._peer.lost_s is not None and now() - self._peer.lost_s >= self._forget_s:
                await self._forget()
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _follow_once(self) -> PeerFault | None:
        """None: it is this node itself, or is followed already."""
        peer = self._peer
        try:
            while (inbox := await self._follow_connection()) is not None:
                await self._follow_bus(inbox)
            return None
        except TimeoutError:
            return peer.fault_of("follow", TimeoutError(f"silent for {SILENT_S:g} s"))
        except (OSError, EOFError, ProtocolError, ValueError, TierError) as error:
            return peer.fault_of("follow", error)
        finally:
            peer.is_open = peer.is_by_bus = False

    async def _follow_connection(self) -> Inbox | None:
        """Until the bus can go on with the inbox. None: as `_follow_once`."""
        peer = self._peer
        stream: Stream | None = None
        asked_ms = 0 if self._inboxes is None else self._inboxes.now_ms()
        try:
            async with asyncio.timeout(_CONNECT_S):
                stream, welcome = await peer.open_to_follow()
            if welcome.incarnation == self._own_incarnation():
                peer.changed_state(is_self=True)
                return None
            if self._is_followed_elsewhere(welcome.incarnation):
                peer.changed_state(is_elsewhere=True)
                return None
            peer.is_open = True
            if welcome.incarnation != peer.incarnation:
                peer.changed_state()
                await self._forget(welcome.incarnation)
            peer.kvhold = login.quoted(welcome.kvhold, _MOST_VERSION)
            peer.name = login.quoted(welcome.name, _MOST_NAME)
            peer.offers_nixl = welcome.channel == NIXL
            self._use_inbox(welcome, asked_ms)
            if self._bus_continues():
                return self._inbox
            follow = encode(p.Follow(peer.incarnation, peer.after))
            await stream.send([peer.introduction(), follow])
            while True:
                async with asyncio.timeout(SILENT_S):
                    news = _news.decode(await read_body(stream))
                await self._take(news)
                if self._inbox is None or not peer.is_followed:
                    continue
                self._inbox.drop(peer.after)
                if self._bus_continues():
                    return self._inbox
        finally:
            if stream is not None:
                stream.close()

    def _use_inbox(self, welcome: p.PeerWelcome | None, asked_ms: int = 0) -> None:
        before, self._inbox = self._inbox, None
        if self._inboxes is None:
            return
        if welcome is not None and welcome.bus is not None:
            self._inbox = self._inboxes.open(
                welcome.incarnation, welcome.bus, asked_ms=asked_ms, own=before
            )
        if before is not None and before is not self._inbox:
            self._inboxes.close(before)

    def _bus_continues(self) -> bool:
        inbox, peer = self._inbox, self._peer
        return (
            inbox is not None
            and peer.after > 0
            and now() >= self._bus_from_s
            and inbox.continues(peer.after)
        )

    async def _follow_bus(self, inbox: Inbox) -> None:
        peer, began_s = self._peer, now()
        peer.is_by_bus = True
        self._is_followed()
        inbox.drop(peer.after)
        try:
            while (record := await inbox.next(peer.after)) is not None:
                if record.after >= peer.after:
                    await self._take(record)
        except (ProtocolError, ValueError) as error:
            peer.after = 0
            log.warning("%s: its record on the bus cannot be used: %s", peer.address, error)
        finally:
            peer.is_by_bus = False
        if now() - began_s > _LONGEST_BUS_PAUSE_S:
            self._bus_pause_s = _LEAST_BUS_PAUSE_S
        self._bus_from_s = now() + self._bus_pause_s
        self._bus_pause_s = min(_LONGEST_BUS_PAUSE_S, 2 * self._bus_pause_s)
        log.info("%s: the bus has a gap or is silent, asking the peer", peer.address)

    async def _take(self, news: p.News) -> None:
        """Raises ProtocolError or ValueError: changes are missing, or cannot be."""
        peer = self._peer
        if isinstance(news, p.Page):
            if news.is_first:
                peer.is_followed, peer.after = False, 0
                await self._forget_chunks()
                peer.clears = {}
            await self._take_clears(news.clears)
            await self._change(news.digests, news.sizes)
            if not news.is_last:
                return
            peer.after = news.number
        else:
            if news.after != peer.after:
                known, peer.after = peer.after, 0
                raise ProtocolError(f"changes after {news.after} came, not after {known}")
            before = peer.after
            for run in news.runs:
                peer.after += await self._change(run.digests, run.sizes)
            await self._take_clears(news.clears)
            peer.after += len(news.clears)
            if peer.after != before:
                peer.record.changed(peer.after - before)
        self._is_followed()

    def _is_followed(self) -> None:
        peer = self._peer
        if not peer.is_followed:
            peer.changed_state(is_followed=True)
            peer.lost_s, self._told = None, ""
            peer.mended()
            log.info("following %s (kvhold %s)", peer.address, peer.kvhold)
            peer.tried.set()

    async def _change(self, digests: bytes, sizes: bytes) -> int:
        """Without sizes, remove the chunks. Returns their number."""
        numbers, nbytes = unpack(digests, sizes)
        peer, index = self._peer.number, self._index
        for begin in range(0, len(numbers), _AT_ONCE):
            part = range(begin, min(len(numbers), begin + _AT_ONCE))
            if not sizes:
                for at in part:
                    index.remove(numbers[at], peer=peer)
            elif len(index) < self._most_chunks:
                for at in part:
                    index.add(numbers[at], nbytes[at], peer=peer)
            await next_turn()
        self._peer.record.indexed(index.count(peer))
        return len(numbers)

    async def _take_clears(self, clears: Sequence[p.ClearNumber]) -> None:
        for at, clear in enumerate(clears, 1):
            if self._numbers.learn(clear.prefix, clear.number):
                self._learned(clear.prefix)
            before = self._peer.clears.get(clear.prefix, 0)
            keep(self._peer.clears, clear.prefix, max(before, clear.number))
            if at % _AT_ONCE == 0:
                await next_turn()

    async def _forget(self, incarnation: int = 0) -> None:
        self._peer.incarnation, self._peer.after = incarnation, 0
        self._peer.clears = {}
        self._peer.lost_s = None
        await self._forget_chunks()

    async def _forget_chunks(self) -> None:
        for _ in self._index.forget(self._peer.number):
            await next_turn()
        self._peer.record.indexed(self._index.count(self._peer.number))
