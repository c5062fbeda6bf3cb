import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhold.cache.transfer.peer_source import PeerSource
from kvhold.core.errors import TierError
from kvhold.net import peers as net_peers
from kvhold.net.stream import Address, Stream
from kvhold.node import peer_feed, peer_publisher, peer_server
from kvhold.node.peer_thread import PeerThread
from kvhold.tiers.base import Origin, Parts, ValueChanges
from kvhold.tiers.peers import PeersConfig, PeersTier, follower, index, peer, roster
from kvhold.tiers.peers.bus import Bus, Inboxes
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from kvhold.tiers.peers.index import digest_of
from kvhold.tiers.ram import Entry
from kvhold_lab.simulation.bus import BUS_SIZES, SimBus
from kvhold_lab.simulation.central import Borrowed
from kvhold_lab.simulation.clears import SimOrigin
from kvhold_lab.simulation.node import NodeDraw, SimNode
from kvhold_lab.simulation.sizes import DrawnSizes
from kvhold_lab.simulation.sockets import SimListener
from kvhold_lab.simulation.world import SimLoop, World

if TYPE_CHECKING:
    from kvhold_lab.simulation.fleet import FleetHost

PORT = 7711
_GET_SLACK_S = 0.5

PEER_SIZES = DrawnSizes(
    (index, "_TABLES", (1, 4, 16)),
    (peer_feed, "_MOST_CHANGES", (1, 3, 500)),
    (peer_feed, "_MOST_KEPT", (1, 5, 50, 200_000)),
    (peer_feed, "_PAGE_CHUNKS", (1, 3, 4000)),
    (follower, "_AT_ONCE", (1, 500)),
    (peer, "_MOST_KEYS", (1, 3, 128)),
    (peer_server, "_GROUP_BYTES", (300, 8 << 20)),
    (peer_server, "_GROUP_KEYS", (1, 3, 128)),
)


class _Time:
    def __init__(self, world: World) -> None:
        self.monotonic = lambda: world.now


class PeersSimulated:
    """Until `restore`, the peers' real code takes times and chances from a world."""

    def __init__(self, world: World) -> None:
        chances = world.random
        self._places: list[tuple[Any, str, Any]] = [
            (peer, "time", _Time(world)),
            (follower, "random", chances),
            (roster, "random", chances),
            (net_peers, "BEAT_S", net_peers.BEAT_S),
            (peer_feed, "randbits", chances.getrandbits),
            (peer_publisher, "random", chances),
            (peer_publisher, "token_bytes", chances.randbytes),
            (peer_publisher, "clock_ms", world.clock_ms),
            (peer_server, "clock_ms", world.clock_ms),
            (Inboxes.__init__, "__defaults__", (world.clock_ms,)),
            (ClearNumbers.__init__, "__defaults__", (world.wall,)),
        ]
        self._kept = [getattr(place, name) for place, name, _ in self._places]
        for place, name, value in self._places:
            setattr(place, name, value)

    def restore(self) -> None:
        PEER_SIZES.restore()
        BUS_SIZES.restore()
        for (place, name, _), kept in zip(self._places, self._kept, strict=True):
            setattr(place, name, kept)


class DiskValues(dict[bytes, tuple[bytes, float]]):
    def __init__(self) -> None:
        super().__init__()
        self.changes = ValueChanges()

    def __setitem__(self, key: bytes, value: tuple[bytes, float]) -> None:
        super().__setitem__(key, value)
        self.changes.tell(key, len(value[0]))

    def pop(self, key: bytes, *default: Any) -> Any:
        if key in self:
            self.changes.tell(key, 0)
        return super().pop(key, *default)


class _SimPeersTier(PeersTier):
    def __init__(self, node: "FleetNode", addresses: Sequence[Address], config: PeersConfig):
        self._node = node
        self._world = node.world
        self._loop = node.tier_worker_loop
        fleet = node.host.fleet
        timing = fleet.members.timing if fleet.members is not None else None
        self._borrowed = Borrowed(node.world, node.checker, f"the peers of {node.host.name}")
        self.given_up: dict[int, set[int]] = {}
        """Digests that this host has removed from its index by itself, by the peer's number."""
        super().__init__(
            addresses,
            config,
            directory=node.host.directory(),
            timing=timing,
            connect=self._connect_to,
        )

    def make_bus(self) -> Bus | None:
        host = self._node.host
        return None if host.fleet.stream is None else SimBus(host.fleet.stream, host.names[0])

    def oldest_bus_s(self) -> float:
        """Return the greatest age of a peer's newest record by bus."""
        if self._bus is None:
            return 0.0
        newest_s = self._bus.newest_s  # type: ignore[attr-defined]
        ages_s = [
            self._world.now - newest_s.get(peer.incarnation, -1.0)
            for peer in self.peers
            if peer.is_by_bus and peer.is_followed
        ]
        return max(ages_s, default=0.0)

    async def _connect_to(self, address: Address, tls: ssl.SSLContext | None) -> Stream:
        host = self._node.host
        network = host.fleet.network
        sock: Any = await network.connect(str(address), self._loop, host.name, self._borrowed.touch)
        return Stream(sock)

    async def get_from(
        self,
        keys: Sequence[bytes],
        into: Sequence[Parts],
        *,
        starts: Sequence[int] | None,
        origins: list[Origin | None],
    ) -> list[int | TierError | None]:
        began_s, number = self._world.now, self._borrowed.lend(into)
        try:
            return await super().get_from(keys, into, starts=starts, origins=origins)
        finally:
            self._borrowed.give_back(number)
            latest_s = max(began_s + self._config.answer_timeout_s, self._loop.stalled_until)
            if self._world.now > latest_s + _GET_SLACK_S:
                self._world.find(
                    f"{self._loop.name}: a get from peers took {self._world.now - began_s:.3f} s, "
                    f"but answer_timeout_s is {self._config.answer_timeout_s:g}"
                )

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        for number in self._roster.numbers:
            self.given_up.setdefault(number, set()).update(map(digest_of, keys))
        return await super().delete(keys)

    async def _fetch(self, peer: Any, items: Any, *more: Any) -> None:
        await super()._fetch(peer, items, *more)
        absent = {digest_of(item.key) for item in items if item.size is None}
        self.given_up.setdefault(peer.number, set()).update(absent)

    def keep_clears(self, learned: Any, numbers: Mapping[bytes, int] | None) -> None:
        host, loop = self._node.host, self._node.loop

        def told(prefix: bytes) -> None:
            learned(prefix)
            loop.call_soon(host.promise.hears, prefix, self.numbers[prefix])

        host.promise.node_began(numbers or {})
        super().keep_clears(told, numbers)

    def advance(self, prefix: bytes, asked_s: float | None = None) -> None:
        super().advance(prefix, asked_s)
        self._node.host.promise.numbered(prefix, self.numbers[prefix])


class FleetNode(SimNode):
    peers: PeerThread
    peers_loop: SimLoop
    peers_tier: _SimPeersTier

    def __init__(self, host: "FleetHost", number: int) -> None:
        self.host = host
        self.host_names = host.names
        self._lent: list[Entry] = []
        super().__init__(
            host.world, host.checker, host.draw.node, host.stores, host.journal, number
        )
        self.checker.lent = lambda: self._lent

    def _all_tiers(self) -> list[Any]:
        return [*self.tiers, self.peers_tier]

    def _make_tier_worker(self, draw: NodeDraw, journal: list[str]) -> Any:
        host = self.host
        self.peers_loop = self.world.new_loop(f"peers-{self.number}")
        for loop in (self.loop, self.tier_worker_loop, self.peers_loop):
            loop.clock = host.clock
        self.peers = PeerThread(host.serving, self.state, self._post, self.peers_loop)
        self.peers_tier = _SimPeersTier(self, host.followed, host.following)
        for name in self.host_names:
            self.host.fleet.network.touch_of_server[name] = self._sends
        self._watch_lent(self.peers._source)
        for fault, store in zip(self.tiers, host.stores, strict=True):
            fault.changes = store.values.changes  # type: ignore[attr-defined]
            fault.changes.tell = self.peers.feed.note_on_disk  # type: ignore[attr-defined]
            for key, (value, _) in store.values.items():
                self.peers.feed.note_on_disk(key, len(value))
        tier_worker: Any = super()._make_tier_worker(draw, journal)
        self._watch_reads()
        self._watch_clears()
        self.peers.use(tier_worker)
        server: Any = self.peers._server
        server._listen = lambda: SimListener(
            host.fleet.network, *(f"{name}:{PORT}" for name in self.host_names)
        )
        server._connection = self.peers_loop.sock_accept
        self.listener_of_peers = server
        self.peers.start()
        return tier_worker

    def _watch_lent(self, source: PeerSource) -> None:
        hold, release = self.state.hold_for_peer, source._release
        promise = self.host.promise

        def holding(keys: Sequence[bytes]) -> Any:
            held = hold(keys)
            for key, one in zip(keys, held, strict=True):
                if one is None:
                    promise.lends(key, self.host.shared.stored.get(key, 0))
                else:
                    self._lent.append(one[0])
                    allocation = self.memory.allocations.get(one[0].offset, -1)
                    origin = self.checker.origins.get(allocation)
                    promise.lends(key, promise.born(key, origin, allocation))
            return held

        def releasing(held: Any) -> None:
            for one in held:
                if one is not None:
                    at = next(at for at, entry in enumerate(self._lent) if entry is one[0])
                    del self._lent[at]
            release(held)

        self.state.hold_for_peer = holding  # type: ignore[method-assign]
        source._release = releasing  # type: ignore[method-assign]

    def _sends(self, view: memoryview, verb: str) -> None:
        """Only pinned chunks are sent from the arena."""
        place = self.checker.place_of(view)
        if place.node is None or not view.nbytes:
            return
        if not any(
            entry.offset <= place.offset < entry.offset + entry.nbytes and entry.pins
            for entry in self._lent
        ):
            self.world.find(f"{self.host.name} sends memory at {place.offset} that is not pinned")

    def _watch_reads(self) -> None:
        searches = self.state._searches
        reserve = searches._reserve

        def reserving(search: Any, need: Any, place: Any) -> Any:
            pending_read = reserve(search, need, place)
            if pending_read is not None:
                is_shared = self.stack.guards[pending_read.place.tier].traits.shared
                allocation = self.memory.allocations[pending_read.entry.offset]
                self.checker.origins[allocation] = SimOrigin(0, is_shared)
            return pending_read

        searches._reserve = reserving  # type: ignore[method-assign]

    def _watch_clears(self) -> None:
        clears = self.stack.guards[-1].clears
        begin = clears.begin

        async def beginning(prefix: bytes, asked_s: float | None = None) -> Any:
            self.host.promise.begins(prefix)
            return await begin(prefix, asked_s)

        clears.begin = beginning  # type: ignore[method-assign]

    @property
    def serves_nothing(self) -> bool:
        server = self.peers._server
        return not self._lent and not server.budget.used and not server.budget._used_by

    def end_gently(self, drain_s: float, ended: Any) -> None:
        ending = self.peers_loop.create_task(self.peers.end())
        end = super().end_gently
        ending.add_done_callback(lambda _: self.world.later(0.0, end, drain_s, ended))

    def kill(self, *, without_power: bool = False) -> None:
        super().kill()
        self.world.kill(self.peers_loop)
        self.peers._server.close()
        for name in self.host_names:
            self.host.fleet.network.leave(name, without_power=without_power)

    def has(self) -> set[int]:
        return {
            digest_of(entry.key)
            for entry in self.state.ram.entries()
            if self.peers._source.frame_size(entry.key, entry.nbytes, entry.num_tokens)
        } | {digest_of(key) for store in self.host.stores for key in store.values}
