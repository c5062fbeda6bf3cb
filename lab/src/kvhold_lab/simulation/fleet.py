"""Simulates hosts that are each other's peers: their indexes, feeds, gets and clears.

Each host is a simulation (`run.py`) with a node, a server of peers and a tier of peers, and often
a disk. A clear on one host must reach all hosts, and no host may use an older chunk of another.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from kvhold.core.config import ServePeersConfig
from kvhold.core.keys import Prompt
from kvhold.core.store_options import DEFAULT_OPTIONS
from kvhold.net import messages as m
from kvhold.net.stream import Address
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.peers import PeersConfig
from kvhold.tiers.peers.index import DIGEST_BYTES, PeerIndex, unpack
from kvhold_lab.simulation.central import STEPS
from kvhold_lab.simulation.checker import Checker
from kvhold_lab.simulation.client import SimClient
from kvhold_lab.simulation.draw import Draw, draw_guard
from kvhold_lab.simulation.fleet_node import PEER_STEPS, PORT, DiskValues, FleetNode
from kvhold_lab.simulation.hosts import draw_small
from kvhold_lab.simulation.links import LinkedNetwork
from kvhold_lab.simulation.node import SimNode
from kvhold_lab.simulation.peer_clears import FleetClears, PeerClears
from kvhold_lab.simulation.run import _REST_S, Simulation
from kvhold_lab.simulation.store import SimTierStore
from kvhold_lab.simulation.world import World

EVERY, AT = 8, 7
"""One in this many seeds simulates peers: those with this remainder."""
_TOKEN = "the token"
_AGREE_S = 90.0  # a follower tries again after 12.5 s at most, and a silent one is lost after 5 s
_LOOK_S = 0.2
_MOST_FOLLOWED = 24


class FleetHost(Simulation):
    def __init__(self, fleet: "Fleet", number: int, drawn: Draw, shared: FleetClears) -> None:
        self.fleet = fleet
        self.number = number
        self.name = f"10.0.{number // 200}.{number % 200 + 1}"
        self.shared = shared
        self.promise = PeerClears(shared, number)
        self.followed: list[Address] = []
        super().__init__(fleet.world, drawn, Checker(fleet.world, self.promise))
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

    def _make_node(self) -> SimNode:
        self.fleet.network.power_on(self.name)
        return FleetNode(self, 100 * self.number + self.num_nodes)

    async def _operation(self, client: SimClient) -> None:
        random, prompt = self.random, self.random.choice(self.draw.prompts)
        while self.node is None and not self.over:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
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
            self.world.note("host %d is down", self.number)
            away_s = self.random.choice((0.0, 0.5, 2.0, 20.0)) * self.random.random()
            self.world.later(away_s, self._start_node)

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
        self.running.state.clear(None)
        self.running.move()

    def wrong_feed(self) -> str:
        """Return what this host tells its followers that is wrong; empty: nothing."""
        node = self.running
        feed: Any = node.peers.feed
        has, told = node.has(), _digests(feed._memory, 0) | _digests(feed._disks, 0)
        if has != told:
            return (
                f"host {self.number} tells of {len(told - has)} chunks that it has not, and not "
                f"of {len(has - told)} that it has"
            )
        return "" if node.serves_nothing else f"host {self.number} still pins chunks for peers"

    def wrong_index(self) -> str:
        """Return what the index of this host has wrong; empty: nothing."""
        tier = self.running.peers_tier
        for one in tier.peers:
            other = self.fleet.host_at(one.address)
            if other is self:
                if not one.is_self:
                    return f"host {self.number} does not know itself"
                continue
            known, there = _digests(tier._index, one.number), other.running.has()
            ghosts = known - there
            missing = there - known - tier.given_up.get(one.number, set())
            if not self.fleet.has_one_size:  # the index keeps one size, and who has this size
                missing = set()
            if not one.is_followed or ghosts or missing:
                return (
                    f"host {self.number} about host {other.number}: followed {one.is_followed}, "
                    f"{len(ghosts)} ghosts, {len(missing)} missing"
                )
        return ""

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


class Fleet:
    """num_hosts: 0: 2 to 4, as the seed says"""

    def __init__(self, world: World, num_hosts: int = 0) -> None:
        self.world = world
        self.random = random = world.random
        STEPS.draw(random)
        PEER_STEPS.draw(random)
        self.network = LinkedNetwork(world)
        self.over = False
        num_hosts = num_hosts or random.choice((2, 2, 3, 4))
        base = draw_small(random, seed=world.seed)
        self.is_large = num_hosts > 4
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
        self._by_name = {host.name: host for host in self.hosts}
        for host in self.hosts:
            # with more hosts than one may follow, clears reach all around a ring
            near = [
                self.hosts[(host.number + step) % num_hosts]
                for step in range(min(num_hosts, _MOST_FOLLOWED))
            ]
            host.followed = [Address(one.name, PORT) for one in near]

    def host_at(self, address: Address) -> FleetHost:
        return self._by_name[address.host]

    def _draw_host(self, base: Draw, random: Random) -> Draw:
        disk = [] if random.random() < 0.5 else [self._draw_guard("disk")]
        guards = (*disk, self._draw_guard("peers"))
        return replace(
            base,
            node=replace(base.node, guards=guards),
            trouble=0.0,
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
            host.begin()
        if self._faults:
            world.later(self.random.expovariate(self._faults), self._trouble)
        world.run(
            lambda: all(host.has_ended() for host in self.hosts), most_s=120.0, most_steps=2_000_000
        )
        if not world.findings:
            self._come_to_rest()

    def _trouble(self) -> None:
        if self.over:
            return
        dice, random, network = self.random.random(), self.random, self.network
        if dice < 0.5:
            random.choice(self.hosts).trouble()
        elif dice < 0.7:
            network.break_one()
        else:
            one, other = random.sample(self.hosts, 2)
            seconds = random.choice((0.3, 3.0, 8.0, 30.0)) * random.random()
            if dice < 0.8:
                network.slow_down(one.name, other.name, random.choice((0.05, 0.5)))
            else:
                network.cut(one.name, other.name)
                if random.random() < 0.7:
                    network.cut(other.name, one.name)
            self.world.note("the link of hosts %d and %d fails", one.number, other.number)
            self.world.later(seconds, network.heal)
        self.world.later(random.expovariate(self._faults), self._trouble)

    def _come_to_rest(self) -> None:
        self.over = True
        self.network.heal()
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
        for host in hosts:
            yield host.check_end
        for host in hosts:
            yield host.end_peers
        for host in hosts:
            yield host.end_tier_worker

    def _agree(self) -> None:
        """Wait until all hosts know all clears, and what their peers have."""
        wrong = ""

        def agrees() -> bool:
            nonlocal wrong
            wrong = (
                self._clears_missing()
                or next(filter(None, (host.wrong_feed() for host in self.hosts)), "")
                or next(filter(None, (host.wrong_index() for host in self.hosts)), "")
            )
            return not wrong

        if not self._run_until(agrees):
            self.world.find(f"after {_AGREE_S:g} s without faults: {wrong}"[:600])

    def _run_until(self, agrees: Any) -> bool:
        """Run for at most `_AGREE_S`. A look takes long, so that there are few."""
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
