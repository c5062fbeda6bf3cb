"""Hosts that are each other's peers; each is a simulation (`run.py`)."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from kvhold.core.config import ServePeersConfig
from kvhold.core.keys import Prompt
from kvhold.core.store_options import DEFAULT_OPTIONS
from kvhold.net import messages as m
from kvhold.net import peers
from kvhold.net.stream import Address
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.peers import PeersConfig
from kvhold.tiers.peers.bus import SILENT_S
from kvhold.tiers.peers.directory import Directory
from kvhold.tiers.peers.index import DIGEST_BYTES, PeerIndex, unpack
from kvhold_lab.simulation.bus import BUS_SIZES, SimStream
from kvhold_lab.simulation.central import CENTRAL_SIZES
from kvhold_lab.simulation.checker import Checker
from kvhold_lab.simulation.client import SimClient
from kvhold_lab.simulation.clocks import draw_clock
from kvhold_lab.simulation.draw import Draw, draw_guard
from kvhold_lab.simulation.fleet_draw import draw_fleet
from kvhold_lab.simulation.fleet_node import PEER_SIZES, PORT, DiskValues, FleetNode
from kvhold_lab.simulation.hosts import draw_small
from kvhold_lab.simulation.links import LinkedNetwork
from kvhold_lab.simulation.membership import SimDns, SimEtcd, SimMembership
from kvhold_lab.simulation.node import SimNode
from kvhold_lab.simulation.peer_clears import FleetClears, PeerClears
from kvhold_lab.simulation.run import _REST_S, Simulation
from kvhold_lab.simulation.store import SimTierStore
from kvhold_lab.simulation.world import World

EVERY, AT = 8, 7
"""One in this many seeds simulates peers: those with this remainder."""
_TOKEN = "the token"
_AGREE_S = 90.0
_LOOK_S = 0.2
_LOOK_AT_BUS_S = 1.0
_MOST_FOLLOWED = 24
_FOLLOWED_OF_MANY = (2, 3, 6)
_RARER = 10  # in a fleet of more than four
_BEAT_OF_MANY_S = 2.5  # half of the silence that loses a peer
_MOST_S, _MOST_OF_MANY_S = 120.0, 40.0  # until the faults end
_LATEST_S = 10.0
_MOST_OLD_S = 2 * SILENT_S + 0.5  # of the newest record, while the bus is followed


class FleetHost(Simulation):
    def __init__(self, fleet: "Fleet", number: int, drawn: Draw, shared: FleetClears) -> None:
        self.fleet = fleet
        self.number = number
        self.name = _ip(0, number)
        self.second_name = _ip(9, number) if fleet.draw.has_two_addresses else ""
        self.shared = shared
        self.promise = PeerClears(shared, number)
        self.clock = draw_clock(fleet.draw.clocks, is_skewed=fleet.draw.is_skewed)
        self.near: list[FleetHost] = []
        """The hosts that it follows, itself too."""
        super().__init__(fleet.world, drawn, Checker(fleet.world, self.promise))
        if fleet.is_large:
            self.pins_every_s *= _RARER
        random = fleet.world.random
        self.stores = [
            SimTierStore(f"disk-{number}", 1 << 20, DiskValues())
            for _ in range(len(drawn.node.guards) - 1)
        ]
        self.num_clients = 100 * number
        self.serving = ServePeersConfig(
            listen=f"{self.name}:{PORT}",
            token=_TOKEN,
            insecure=True,
            request_timeout_s=random.choice((1.0, 3.0, 60.0)),
            in_flight_bytes=random.choice((300, 2_000, 1 << 20)),
        )
        self.following = PeersConfig(
            token=_TOKEN,
            insecure=True,
            connections=random.choice((1, 2, 4)),
            answer_timeout_s=random.choice((0.1, 0.5, 2.0)),
            pause_s=random.choice((0.05, 1.0)),
            forget_s=random.choice((0.0, 2.0, 60.0)),
        )

    @property
    def names(self) -> list[str]:
        return [self.name, self.second_name] if self.second_name else [self.name]

    @property
    def addresses(self) -> list[Address]:
        return [Address(name, PORT) for name in self.names]

    @property
    def followed(self) -> list[Address]:
        if self.fleet.members is not None:
            return []
        return [address for one in self.near for address in one.addresses]

    def directory(self) -> Directory | None:
        members = self.fleet.members
        if members is None:
            return None
        return members.directory([one.number for one in (self, *self.near) if one is not self])

    def _make_node(self) -> SimNode:
        fleet = self.fleet
        if fleet.members is not None and (fleet.is_taken(self) or self.random.random() < 0.4):
            self.name = fleet.free_name(self)
            self.serving = replace(self.serving, listen=f"{self.name}:{PORT}")
        for name in self.names:
            fleet.network.power_on(name)
        node = FleetNode(self, 100 * self.number + self.num_nodes)
        fleet.tell_directory(self, is_there=True)
        return node

    def _start_client(self) -> None:
        super()._start_client()
        if self.fleet.is_large:
            self.clients[-1].hurry()

    async def _operation(self, client: SimClient) -> None:
        random, prompt = self.random, self.random.choice(self.draw.prompts)
        while self.node is None and not self.over:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if self.fleet.draw.pause_s:
            await asyncio.sleep(random.random() * self.fleet.draw.pause_s)
        if (dice := random.random()) < self.fleet.clears:
            await self._clear(client, random.choice((None, prompt.namespace.digest)))
        elif dice < 0.4:
            await self._store(client, prompt)
        elif dice < 0.95:
            if self.node is not None and random.random() < 0.5:
                self.node.evict(random.choice((0.5, 1.0)))
            await self._load(client, prompt)
        else:
            await client.hang_up()

    async def _store(self, client: SimClient, prompt: Prompt) -> None:
        await client.store(prompt, first=0, shard=0, store_options=DEFAULT_OPTIONS, leave=0)

    async def _load(self, client: SimClient, prompt: Prompt) -> None:
        await client.load(
            prompt, have_tokens=0, work=None, wait_s=self.random.choice((0.5, 5.0)), share=False
        )

    async def _clear(self, client: SimClient, prefix: bytes | None) -> None:
        await client.call(await client.link(), m.Clear(prefix), m.Done)

    def _kill_node(self) -> None:
        if self.node is not None:
            assert isinstance(self.node, FleetNode)
            self.node.kill(without_power=self.random.random() < 0.5)
            self.node = None
            self.fleet.tell_directory(self, is_there=False)
            self.world.note("host %d is down", self.number)
            away_s = self.random.choice((0.0, 0.5, 2.0, 20.0)) * self.random.random()
            self.world.later(away_s, self._start_node)

    def _stop_node(self) -> None:
        super()._stop_node()
        self.fleet.tell_directory(self, is_there=False)

    def trouble(self) -> None:
        kinds = (
            *(self._kill_node, self._stop_node, self._fail, self._flip, self._flip_below),
            *(self._kill_client, self._hurry, self._stop_a_thread, self._stop_the_server),
        )
        self.random.choice(kinds)()

    def _stop_the_server(self) -> None:
        if isinstance(self.node, FleetNode):
            self.node.peers_loop.stall(self.random.choice((0.5, 3.0, 8.0)))

    def _nodes(self) -> Iterator[FleetNode]:
        if isinstance(self.node, FleetNode):
            yield self.node

    @property
    def running(self) -> FleetNode:
        assert isinstance(self.node, FleetNode)
        return self.node

    def end_trouble(self) -> None:
        self._end_trouble()

    def end_calls(self) -> None:
        if not self.world.findings:
            self._end_calls(self.running)

    def rest(self, since: str) -> None:
        self._rest(self.running, f"host {self.number}: {since}")

    def clear_all(self) -> None:
        self.world.enter(self.running.loop)
        self.running.state.clear(None)
        self.running.move()
        self.world.enter(None)

    def check_bus(self) -> None:
        node, now = self.node, self.world.now
        if not isinstance(node, FleetNode) or node.tier_worker_loop.stalled_until + 1.0 > now:
            return
        if (age_s := node.peers_tier.oldest_bus_s()) > _MOST_OLD_S:
            self.world.find(
                f"host {self.number} follows a peer over the bus, but its newest record is "
                f"{age_s:.3f} s old"
            )

    def wrong_way(self) -> str:
        late = [
            str(one.address)
            for one in self.running.peers_tier.peers
            if one.is_followed and not one.is_by_bus
        ]
        return f"host {self.number} does not use the bus for {late}" if late else ""

    def wrong_feed(self) -> str:
        node = self.running
        feed: Any = node.peers.feed
        has, told = self.fleet.has(self), _digests(feed._memory, 0) | _digests(feed._disks, 0)
        if has != told:
            return (
                f"host {self.number} tells of {len(told - has)} chunks that it has not, and not "
                f"of {len(has - told)} that it has"
            )
        return "" if node.serves_nothing else f"host {self.number} still pins chunks for peers"

    def wrong_index(self) -> str:
        tier = self.running.peers_tier
        unknown = {one.number for one in self.near if one is not self}
        for one in tier.peers:
            other = self.fleet.host_at(one.address)
            if other is None:
                return f"host {self.number} lists {one.address}, which no host has"
            if other is self:
                if not one.is_self:
                    return f"host {self.number} does not know itself"
                continue
            if one.is_elsewhere:
                continue
            unknown.discard(other.number)
            known, there = _digests(tier._index, one.number), self.fleet.has(other)
            ghosts = known - there
            missing = there - known - tier.given_up.get(one.number, set())
            if not self.fleet.has_one_size:
                missing = set()
            if not one.is_followed or ghosts or missing:
                return (
                    f"host {self.number} about host {other.number}: followed {one.is_followed}, "
                    f"{len(ghosts)} ghosts, {len(missing)} missing"
                )
        return f"host {self.number} does not follow hosts {unknown}" if unknown else ""

    def check_end(self) -> None:
        self.checker.check_pins()
        self.checker.check_baseline()
        for store in self.stores:
            if store.values:
                self.world.find(
                    f"host {self.number}: {store.name} still has {len(store.values)} values"
                )

    def end_peers(self) -> None:
        node = self.running
        ending = node.peers_loop.create_task(node.peers.end())
        if not self.world.run(ending.done, most_s=_REST_S):
            self.world.find(f"host {self.number}: the server of peers does not end")
        left = [task for task in node.peers_loop.tasks if not task.done()]
        if left and not self.world.findings:
            self.world.find(f"host {self.number}: the server of peers leaves tasks: {left[:3]}")

    def end_tier_worker(self) -> None:
        self._end_tier_worker(self.running)


def _digests(of: PeerIndex, number: int) -> set[int]:
    found: set[int] = set()
    for part in of.parts(number):
        assert len(part.digests) % DIGEST_BYTES == 0
        found.update(unpack(part.digests, part.sizes)[0])
    return found


def _ip(network: int, number: int) -> str:
    return f"10.{network}.{number // 200}.{number % 200 + 1}"


class Fleet:
    """num_hosts: 0: 2 to 4, by the seed
    stream:  None: no bus
    members: None: a fixed list of peers
    """

    def __init__(self, world: World, num_hosts: int = 0) -> None:
        self.world = world
        self.random = random = world.random
        CENTRAL_SIZES.draw(random)
        PEER_SIZES.draw(random)
        self.network = LinkedNetwork(world)
        self.over = False
        num_hosts = num_hosts or random.choice((2, 2, 3, 4))
        base = draw_small(random, seed=world.seed)
        self.is_large = num_hosts > 4
        self.draw = draw_fleet(world.seed, num_hosts)
        self.stream: SimStream | None = None
        if self.draw.has_bus:
            BUS_SIZES.draw(random)
            self.stream = SimStream(world, usual_s=0.2 if self.is_large else 0.001)
        self.members: SimMembership | None = None
        if self.draw.directory != "static":
            is_dns = self.draw.directory == "dns"
            self.members = SimDns(world, PORT) if is_dns else SimEtcd(world)
        self._faults = base.trouble * (4 if self.is_large else 1)
        self.clears = 0.08 if not self.is_large else 0.4 / num_hosts
        shared = FleetClears(world)
        self.hosts = [
            FleetHost(self, number, self._draw_host(base, random), shared)
            for number in range(num_hosts)
        ]
        self.has_one_size = all(
            guard.codec == "raw" for host in self.hosts for guard in host.draw.node.guards
        )
        self._late = self.hosts[0]
        self._has: dict[int, set[int]] = {}
        self._by_name = {name: host for host in self.hosts for name in host.names}
        num_near = num_hosts
        if num_hosts > _MOST_FOLLOWED:  # clears go around a ring
            peers.BEAT_S = _BEAT_OF_MANY_S
            num_near = 1 + random.choice(_FOLLOWED_OF_MANY)
        for host in self.hosts:
            host.near = [self.hosts[(host.number + step) % num_hosts] for step in range(num_near)]

    def host_at(self, address: Address) -> FleetHost | None:
        return self._by_name.get(address.host)

    def free_name(self, host: FleetHost) -> str:
        there = [one.name for one in self.hosts if one.node is not None or one.stopping]
        names = [_ip(0, number) for number in range(len(self.hosts) + 3)]
        name = self.random.choice([one for one in names if one not in there])
        if self._by_name.get(host.name) is host:
            del self._by_name[host.name]
        self._by_name[name] = host
        self.world.note("host %d is at %s", host.number, name)
        return name

    def is_taken(self, host: FleetHost) -> bool:
        return self._by_name.get(host.name) is not host

    def tell_directory(self, host: FleetHost, *, is_there: bool) -> None:
        if self.members is not None:
            self.members.has_changed(host.number, host.names if is_there else ())

    def _draw_host(self, base: Draw, random: Random) -> Draw:
        disk = [] if random.random() < 0.5 else [self._draw_guard("disk")]
        guards = (*disk, self._draw_guard("peers"))
        node = replace(base.node, guards=guards)
        if self.is_large:
            node = replace(node, scrub_interval_s=0.0)
        return replace(
            base,
            node=node,
            trouble=0.0,
            pressure_s=base.pressure_s * (_RARER if self.is_large else 1),
            num_clients=1 if self.is_large else random.choice((1, 1, 2)),
            tasks_a_client=1 if self.is_large else random.choice((1, 2)),
            operations=random.choice((2, 4)) if self.is_large else random.choice((10, 15, 30)),
            store_bytes=(),
        )

    def _draw_guard(self, name: str) -> GuardConfig:
        drawn = draw_guard(self.random, 0)
        codec = "raw" if name == "peers" else drawn.codec
        return replace(drawn, name=name, codec=codec, read_only=False)

    def run(self) -> None:
        world = self.world
        for host in self.hosts:
            if self.members is not None and self.random.random() < 0.3:
                world.later(self.random.random() * _LATEST_S, host.begin)
            else:
                host.begin()
        if self._faults:
            world.later(self.random.expovariate(self._faults), self._trouble)
        if self.stream is not None and not self.is_large:
            world.later(_LOOK_AT_BUS_S, self._look_at_bus)
        most_s = _MOST_OF_MANY_S if self.is_large else _MOST_S
        world.run(self._have_ended, most_s=most_s, most_steps=2_000_000)
        if not world.findings:
            self._come_to_rest()

    def _have_ended(self) -> bool:
        for host in (self._late, *self.hosts):
            if not host.has_ended():
                self._late = host
                return False
        return True

    def _trouble(self) -> None:
        if self.over:
            return
        random = self.random
        if self.stream is not None and random.random() < 0.25:
            self.stream.trouble([host.name for host in self.hosts])
        elif self.members is not None and random.random() < 0.25:
            self.members.trouble()
        elif self.draw.is_skewed and random.random() < 0.05:
            random.choice(self.hosts).clock.step(random)
        else:
            self._trouble_of_hosts()
        self.world.later(random.expovariate(self._faults), self._trouble)

    def _look_at_bus(self) -> None:
        for host in self.hosts:
            host.check_bus()
        if not self.over:
            self.world.later(_LOOK_AT_BUS_S, self._look_at_bus)

    def _trouble_of_hosts(self) -> None:
        dice, random, network = self.random.random(), self.random, self.network
        if dice < 0.5:
            random.choice(self.hosts).trouble()
        elif dice < 0.7:
            network.break_one()
        else:
            one, other = random.sample(self.hosts, 2)
            seconds = random.choice((0.3, 3.0, 8.0, 30.0)) * random.random()
            far = random.choice(other.names) if other.second_name else other.name
            if dice < 0.8:
                network.slow_down(one.name, far, random.choice((0.05, 0.5)))
            else:
                network.cut(one.name, far)
                if random.random() < 0.7:
                    network.cut(far, one.name)
            self.world.note("the link of hosts %d and %d fails", one.number, other.number)
            self.world.later(seconds, network.heal)

    def _come_to_rest(self) -> None:
        self.over = True
        self.network.heal()
        if self.stream is not None:
            self.stream.end_trouble()
        if self.members is not None:
            self.members.end_trouble()
        for step in self._steps():
            if self.world.findings:
                return
            step()

    def _steps(self) -> Iterator[Any]:
        hosts = self.hosts
        for host in hosts:
            yield host.end_trouble
        for host in hosts:
            yield host.end_calls
        for host in hosts:
            yield lambda host=host: host.rest("the clients have left")
        yield self._agree
        yield hosts[0].clear_all
        for host in hosts:
            yield lambda host=host: host.rest("host 0 has cleared all")
        yield self._agree
        for host in hosts:
            yield lambda host=host: host.rest("it has learned of that")
        if self.stream is not None and not self.is_large:
            yield self._use_bus
        for host in hosts:
            yield host.check_end
        for host in hosts:
            yield host.end_peers
        for host in hosts:
            yield host.end_tier_worker

    def _agree(self) -> None:
        wrong = ""

        def agrees() -> bool:
            nonlocal wrong
            self._has.clear()
            wrong = (
                self._clears_missing()
                or self._first_wrong(FleetHost.wrong_index)
                or self._first_wrong(FleetHost.wrong_feed)
            )
            return not wrong

        if not self._run_until(agrees):
            self.world.find(f"after {_AGREE_S:g} s without faults: {wrong}"[:600])

    def has(self, host: FleetHost) -> set[int]:
        """While no time passes."""
        if host.number not in self._has:
            self._has[host.number] = host.running.has()
        return self._has[host.number]

    def _use_bus(self) -> None:
        wrong = ""

        def is_used() -> bool:
            nonlocal wrong
            wrong = self._first_wrong(FleetHost.wrong_way)
            return not wrong

        if not self._run_until(is_used):
            self.world.find(f"after {_AGREE_S:g} s without faults: {wrong}"[:600])

    def _first_wrong(self, look: Callable[[FleetHost], str]) -> str:
        for host in (self._late, *self.hosts):
            if wrong := look(host):
                self._late = host
                return wrong
        return ""

    def _run_until(self, agrees: Any) -> bool:
        world = self.world
        end_s = world.now + _AGREE_S
        while not agrees():
            if world.now >= end_s or world.findings:
                return False
            passed: list[bool] = []
            world.later(_LOOK_S, passed.append, True)
            world.run(lambda passed=passed: bool(passed), most_s=2 * _LOOK_S)  # type: ignore[misc]
        return True

    def _clears_missing(self) -> str:
        latest: dict[bytes, int] = {}
        told = [host.running.peers_tier.clear_numbers.announced for host in self.hosts]
        for numbers in told:
            for prefix, number in numbers.items():
                latest[prefix] = max(number, latest.get(prefix, 0))
        late = [
            host.number
            for host, numbers in zip(self.hosts, told, strict=True)
            if any(numbers.get(prefix, 0) < number for prefix, number in latest.items())
        ]
        return f"hosts {late} have not learned of all clears" if late else ""
