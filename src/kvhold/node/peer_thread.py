"""Serves a node's peers in a thread. The node's loop only pins chunks."""

import asyncio
import threading
from collections.abc import Callable

from kvhold.cache.state import CacheState
from kvhold.cache.transfer.peer_source import PeerSource
from kvhold.cache.transfer.tier_worker import TierWorker
from kvhold.core.config import ServePeersConfig
from kvhold.core.keys import HANDED_OVER
from kvhold.core.metrics import Metrics
from kvhold.core.status import ServedPeersStatus
from kvhold.node.host import run_when_woken
from kvhold.node.peer_feed import PeerFeed
from kvhold.node.peer_loads import PeerLoads
from kvhold.node.peer_publisher import PeerPublisher
from kvhold.node.peer_server import PeerServer
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.channel import ChannelPlan
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from kvhold.tiers.peers.directory import Own, parse_address
from kvhold.tiers.ram import ADMITTED, Entry


class PeerThread:
    def __init__(
        self,
        config: ServePeersConfig,
        state: CacheState,
        post: Callable[[Callable[[], None]], None],
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        plan: ChannelPlan | None = None,
    ) -> None:
        """loop: to run in, without a thread; the caller awaits `end`, not `close`
        plan: None: chunks are sent over TCP

        Raises ConfigError.
        """
        self._source = source = PeerSource(state, post)
        self.feed = PeerFeed(source.frame_size)
        self._advertise = (
            str(parse_address(config.advertise, where="peers.advertise"))
            if config.advertise
            else ""
        )
        self._tier: PeersTier | None = None
        self._publisher: PeerPublisher | None = None
        self.metrics = Metrics()
        self._loads = PeerLoads(state, post)
        self._server = PeerServer(config, source, self.feed, self.metrics, plan, self._loads)
        self._loop = loop or asyncio.new_event_loop()
        self._loop.call_soon(self.feed.start)
        self._thread = threading.Thread(target=self._run, name="kvhold-peers", daemon=True)
        if loop is None:
            self._thread.start()
        state.watch_chunks(self._note)
        state.watch_computing(self._note_computing)

    @property
    def address(self) -> str:
        host = self._server.host
        return f"[{host}]:{self._server.port}" if ":" in host else f"{host}:{self._server.port}"

    def use(self, tier_worker: TierWorker | None) -> ClearNumbers | None:
        """Read a tier worker's disks, and announce the clears that its tier of peers knows.

        Without such a tier, return numbers for the caller to announce.
        """
        tier = None if tier_worker is None else tier_worker.peers_tier
        if tier_worker is not None:
            self._source.read_disks = tier_worker.read_for_peer
        if tier is not None:
            self._tier = self._loads.tier = tier
            tier.own_number = self._own_number
            tier.serve_as(Own(incarnation=self.feed.incarnation, port=self._server.port))
            self.feed.follow_clears(tier.clear_numbers)
            if (bus := tier.make_bus()) is not None:
                self._publisher = PeerPublisher(self.feed, bus)
            return None
        numbers = ClearNumbers()
        self.feed.follow_clears(numbers)
        return numbers

    def start(self) -> None:
        self._server.listen()
        if self._tier is not None:
            address = self._advertise or self.address
            self._tier.serve_as(Own(address, self.feed.incarnation, self._server.port))
        self._loop.call_soon_threadsafe(self._server.start)
        if self._publisher is not None:
            self._loop.call_soon_threadsafe(self._publisher.start)

    def close(self) -> None:
        """The node's loop must still run. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self.end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def end(self) -> None:
        """As `close`, but leave the loop running."""
        if self._publisher is not None:
            await self._publisher.stop()
        await self._server.stop()

    def status(self) -> ServedPeersStatus:
        channel, channel_reason = self._server.channel
        return {
            "address": self.address,
            "channel": channel,
            "channel_reason": channel_reason,
            "incarnation": self.feed.incarnation,
            "connections": self._server.num_served,
            "chunks": len(self.feed),
            "index_bytes": self.feed.index_bytes,
            "in_flight_bytes": self._server.budget.used,
            "peers": self._server.peers.status(self._server.budget.used_by),
            "refused": self._server.peers.status_of_refused(),
            "counters": self.metrics.as_dict(),
        }

    async def _own_number(self) -> int:
        latest = asyncio.run_coroutine_threadsafe(self.feed.latest(), self._loop)
        return await asyncio.wrap_future(latest)

    def _run(self) -> None:
        run_when_woken()  # in long slices, it keeps engines waiting for a core
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _note_computing(self, name: bytes, is_computed: bool) -> None:
        self.feed.note_on_disk(name + HANDED_OVER, int(is_computed))

    def _note(self, what: str, entry: Entry) -> None:
        self.feed.note(entry.key, entry.nbytes if what == ADMITTED else 0, entry.num_tokens)
