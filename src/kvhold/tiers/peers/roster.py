"""The followed peers, from the tier's URL or a directory.

The chunks of an unlisted peer are not found. One event loop, but for `status` and `own`.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from kvhold.core.errors import TierError, TierUnavailable
from kvhold.core.status import FollowedPeersStatus
from kvhold.core.turns import next_turn
from kvhold.net.stream import Address
from kvhold.tiers.peers.directory import Directory, DirectoryConfig, Listing, Own
from kvhold.tiers.peers.faults import TIER
from kvhold.tiers.peers.index import MOST_PEERS, PeerIndex
from kvhold.tiers.peers.peer import Peer

log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 4.0  # less than a check may take, see `GuardConfig.get_timeout_s`
_LEAVE_TIMEOUT_S = 2.0
_MOST_NAMED = 10
_GOES_ON = "the last list stays in use"
TOO_MANY = (
    f"at most {MOST_PEERS} peers are followed; for more hosts use a central cache (kvhold://), or "
    "divide them into several lists"
)


class Follows(Protocol):
    async def run(self) -> None: ...


class Roster:
    def __init__(
        self,
        index: PeerIndex,
        *,
        make_peer: Callable[[int, Address], Peer],
        make_follower: Callable[[Peer], Follows],
        forget_s: float,
        addresses: Sequence[Address] = (),
        directory: Directory | None = None,
        timing: DirectoryConfig | None = None,
    ) -> None:
        """make_peer: called with the peer's number and its address
        addresses: without a directory: all peers, at most MOST_PEERS
        """
        self._index = index
        self._make_peer = make_peer
        self._make_follower = make_follower
        self._forget_s = forget_s
        self._directory = directory
        self._timing = timing or DirectoryConfig()
        self._peers: dict[int, Peer] = {}
        self._following: dict[Peer, asyncio.Task[None]] = {}
        self._leaving: dict[Peer, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_closed = False
        self._wake = asyncio.Event()
        self._was_read = asyncio.Event()
        self._list_fault = ""
        self._list_read_s = 0.0
        self._has_list = directory is None
        self.own = Own()
        for address in addresses:
            self._add(address)

    @property
    def peers(self) -> list[Peer]:
        return [peer for _, peer in sorted(dict(self._peers).items()) if peer.is_listed]

    @property
    def has_directory(self) -> bool:
        return self._directory is not None

    @property
    def list_fault(self) -> str:
        return self._list_fault

    @property
    def numbers(self) -> list[int]:
        return list(self._peers)

    def by_number(self, number: int) -> Peer | None:
        return self._peers.get(number)

    def start(self) -> None:
        if self._loop is not None or self._is_closed:
            return
        self._loop = asyncio.get_running_loop()
        self._list_read_s = self._loop.time()
        for peer in self.peers:
            self._follow(peer)
        if self._directory is not None:
            self._reading = self._loop.create_task(self._keep_reading(self._directory))

    async def wait_for_list(self) -> None:
        if self._directory is not None:
            await self._was_read.wait()

    def serve_as(self, own: Own) -> None:
        """Any thread."""
        self.own = own
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    def is_followed_elsewhere(self, peer: Peer, incarnation: int) -> bool:
        return any(
            other.is_open and other.incarnation == incarnation
            for other in self._peers.values()
            if other is not peer
        )

    def status(self) -> FollowedPeersStatus:
        directory, loop = self._directory, self._loop
        return {
            "directory": "" if directory is None else directory.source,
            "list_age_s": round(loop.time() - self._list_read_s, 3)
            if directory is not None and loop is not None and self._has_list
            else None,
            "list_fault": self._list_fault,
            "registered": "" if directory is None else directory.registered_as(),
            "bus": "",
            "bus_fault": "",
            "bus_ignored": 0,
            "chunks": len(self._index),
            "peers": [peer.status(self._index.count(peer.number)) for peer in self.peers],
        }

    async def close(self) -> None:
        self._is_closed = True
        tasks = [*self._following.values(), *self._leaving.values()]
        if self._reading is not None:
            tasks.append(self._reading)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for peer in self._peers.values():
            await peer.end_channel()
            peer.close()
        if self._directory is not None:
            try:
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._directory.close()
            except (TierError, TimeoutError) as error:
                log.info("%s: %s", self._directory.source, str(error) or "no answer")

    async def _keep_reading(self, directory: Directory) -> None:
        while True:
            self._wake.clear()
            try:
                await self._read_once(directory)
            except Exception as error:
                fault = f"{directory.source}: {type(error).__name__}; {_GOES_ON}"
                if fault != self._list_fault:
                    log.exception("%s", directory.source)
                self._list_fault = fault
            self._was_read.set()
            # `wait_for` of Python 3.11 swallows a cancellation that comes with the wake
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.refresh_s * (0.75 + random.random() / 2)):
                    await self._wake.wait()

    async def _read_once(self, directory: Directory) -> None:
        assert self._loop is not None
        listing: Listing | None = None
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                listing = await directory.read(self.own)
            fault = listing.fault
            if not listing.is_usable:
                fault = f"{fault or f'{directory.source} lists no peer'}; {_GOES_ON}"
        except TimeoutError:
            fault = f"{TierUnavailable(TIER, 'list', f'{directory.source}: no answer')}; {_GOES_ON}"
        except TierError as error:
            fault = f"{error}; {_GOES_ON}"
        if listing is not None and listing.is_usable:
            self._has_list, self._list_read_s = True, self._loop.time()
            if num_left_out := await self._use(listing.addresses):
                fault = (
                    f"{directory.source} lists {num_left_out + MOST_PEERS} peers, and "
                    f"{num_left_out} are left out: {TOO_MANY}"
                )
        elif self._loop.time() - self._list_read_s >= self._timing.keep_list_s:
            await self._use([peer.address for peer in self.peers if peer.is_followed])
        self._report(fault)

    def _report(self, fault: str) -> None:
        if fault and fault != self._list_fault:
            log.warning("%s", fault)
        elif self._list_fault and not fault:
            log.info("the list of peers is read again")
        self._list_fault = fault

    async def _use(self, addresses: Iterable[Address]) -> int:
        """Follow only these peers, known ones first. Returns the number beyond the limit."""
        wanted = set(addresses)
        unlisted = [peer for peer in self.peers if peer.address not in wanted]
        for peer in unlisted:
            await self._leave(peer)
        here = {peer.address for peer in self.peers}
        added = sorted(wanted - here, key=lambda one: (one.host, one.port))
        fitting = added[: MOST_PEERS - len(here)]
        for address in fitting:
            await self._join(address)
        if unlisted or fitting:
            log.info(
                "%d peers are listed; new: %s; gone: %s",
                len(self.peers),
                _named(fitting),
                _named([peer.address for peer in unlisted]),
            )
        return len(added) - len(fitting)

    async def _join(self, address: Address) -> None:
        peer = next((one for one in self._leaving if one.address == address), None)
        if peer is not None:
            await _end(self._leaving.pop(peer))
            peer.is_listed = True
        else:
            if len(self._peers) >= MOST_PEERS:
                await self._forget_oldest()
            peer = self._add(address)
        self._follow(peer)

    async def _leave(self, peer: Peer) -> None:
        assert self._loop is not None
        peer.is_listed = False
        peer.changed_state()
        await _end(self._following.pop(peer))
        peer.changed_state()
        self._leaving[peer] = self._loop.create_task(self._forget_later(peer))

    async def _forget_later(self, peer: Peer) -> None:
        await asyncio.sleep(self._forget_s)
        await self._forget(peer)
        del self._leaving[peer]

    async def _forget_oldest(self) -> None:
        peer = next(iter(self._leaving))
        await _end(self._leaving.pop(peer))
        await self._forget(peer)

    async def _forget(self, peer: Peer) -> None:
        peer.incarnation = peer.after = 0
        for _ in self._index.forget(peer.number):
            await next_turn()
        del self._peers[peer.number]
        await peer.end_channel()
        peer.close()

    def _add(self, address: Address) -> Peer:
        number = next(number for number in range(MOST_PEERS) if number not in self._peers)
        peer = self._peers[number] = self._make_peer(number, address)
        return peer

    def _follow(self, peer: Peer) -> None:
        assert self._loop is not None
        self._following[peer] = self._loop.create_task(self._make_follower(peer).run())


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait((task,))


def _named(addresses: Sequence[Address]) -> str:
    names = [str(address) for address in addresses[:_MOST_NAMED]]
    more = len(addresses) - len(names)
    return ", ".join(names + ([f"{more} more"] if more else [])) or "none"
