import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from kvhold.cache.transfer.commands import ProbeCommand
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.core.store_options import DEFAULT_OPTIONS
from kvhold.net import messages as m
from kvhold.tiers.generations import is_marker
from kvhold.tiers.guard_config import GuardConfig
from kvhold_lab.simulation.central import SimCentral
from kvhold_lab.simulation.checker import Checker
from kvhold_lab.simulation.clears import HostClears, Markers, Shared, SimOrigin, number_of
from kvhold_lab.simulation.client import SimClient
from kvhold_lab.simulation.draw import Draw, draw, draw_guard, draw_rules
from kvhold_lab.simulation.node import NodeDraw, SimNode
from kvhold_lab.simulation.run import _REST_S, Simulation
from kvhold_lab.simulation.store import SimTierStore
from kvhold_lab.simulation.world import World

EVERY = 6
"""One in this many seeds simulates several hosts."""
# left out: they would lose markers, which `Hosts` does itself
_LIES = (("probe", "stale"), ("probe", "truncate"))
# left out with a central cache
_DAMAGES = ("corrupt", "truncate", "swap", "stale")


class _Values(dict[bytes, tuple[bytes, float]]):
    def __init__(self, markers: Markers) -> None:
        super().__init__()
        self._markers = markers

    def __setitem__(self, key: bytes, value: tuple[bytes, float]) -> None:
        super().__setitem__(key, value)
        self._markers.came(key)

    def pop(self, key: bytes, *default: Any) -> Any:
        self._markers.went(key)
        return super().pop(key, *default)


class HostNode(SimNode):
    def __init__(self, host: "SimHost", number: int) -> None:
        self.host = host
        super().__init__(
            host.world, host.checker, host.draw.node, host.stores, host.journal, number
        )

    def _make_tier(self, store: Any) -> Any:
        if isinstance(store, SimCentral):
            return store.tier(self.checker, self.tier_worker_loop, self.host.name)
        return super()._make_tier(store)

    def _make_tier_worker(self, draw: NodeDraw, journal: list[str]) -> Any:
        tier_worker: Any = super()._make_tier_worker(draw, journal)
        [shared] = [guard for guard in self.stack.guards if guard.traits.shared]
        reached = tier_worker._journal.reached(shared.name)
        self.host.promise.node_began(shared, reached, [self.loop, self.tier_worker_loop])
        self._watch_probes(tier_worker)
        self._watch_births(tier_worker)
        return tier_worker

    def _watch_births(self, tier_worker: Any) -> None:
        frame, frames = tier_worker._write_behind._frame, {}
        born = self.host.promise.shared.born

        async def framing(guard: Any, coding: Any, write: Any) -> Any:
            allocation = self.memory.allocations.get(write.command.entry.offset, -1)
            written = await frame(guard, coding, write)
            if written is not None:
                key = write.command.entry.key
                frames[id(written.parts)] = self.host.promise.born(
                    key, self.checker.origins.get(allocation), allocation
                )
            return written

        def watch(guard: Any, store: str) -> None:
            put, get = guard.put, guard.get

            async def putting(items: Any, **options: Any) -> Any:
                for name, (_, parts) in zip(
                    guard.names([key for key, _ in items]), items, strict=True
                ):
                    born[store, name] = max(frames.get(id(parts), 0), born.get((store, name), 0))
                return await put(items, **options)

            async def getting(keys: Any, into: Any, **options: Any) -> Any:
                names = guard.names(keys)
                outcome = await get(keys, into, **options)
                for key, names_of_key in zip(
                    keys, zip(names, guard.names(keys), strict=True), strict=True
                ):
                    self._came_up(key, max(born.get((store, name), 0) for name in names_of_key))
                return outcome

            guard.put, guard.get = putting, getting

        tier_worker._write_behind._frame = framing
        for guard, store in zip(self.stack.guards, self.host.stores, strict=True):
            watch(guard, store.name)

    def _came_up(self, key: bytes, born: int) -> None:
        coming = self.state._searches._coming.get(key)
        if coming is not None:
            allocation = self.memory.allocations.get(coming.pending_read.entry.offset, -1)
            if (origin := self.checker.origins.get(allocation)) is not None:
                self.checker.origins[allocation] = replace(origin, born=born)

    def _watch_probes(self, tier_worker: Any) -> None:
        probe, searches = tier_worker._probe, self.state._searches
        reserve = searches._reserve
        began: dict[int, int] = {}

        async def probing(command: ProbeCommand) -> None:
            for one in (command, *command.others):
                began[one.search] = self.world.number()
            await probe(command)

        def reserving(search: Any, need: Any, place: Any) -> Any:
            pending_read = reserve(search, need, place)
            if pending_read is not None:
                number = next(number for number, one in searches._searches.items() if one is search)
                is_shared = self.stack.guards[pending_read.place.tier].traits.shared
                allocation = self.memory.allocations[pending_read.entry.offset]
                self.checker.origins[allocation] = SimOrigin(began.get(number, 0), is_shared)
            return pending_read

        tier_worker._probe, searches._reserve = probing, reserving  # type: ignore[method-assign]

    def kill(self) -> None:
        super().kill()
        for store in self.host.stores:
            if isinstance(store, SimCentral):
                store.host_died(self.tier_worker_loop)


class SimHost(Simulation):
    def __init__(
        self, hosts: "Hosts", number: int, drawn: Draw, shared: Shared, stores: list[Any]
    ) -> None:
        self.hosts = hosts
        self.number = number
        self.name = f"10.0.0.{number}"
        self.promise = HostClears(shared, number)
        super().__init__(hosts.world, drawn, Checker(hosts.world, self.promise))
        self.stores = stores
        self.num_clients = 100 * number

    def _make_node(self) -> SimNode:
        return HostNode(self, 100 * self.number + self.num_nodes)

    async def _operation(self, client: SimClient) -> None:
        random, prompt = self.random, self.random.choice(self.draw.prompts)
        while self.node is None and not self.over:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if (dice := random.random()) < 0.08:
            await self._clear(client)
        elif dice < 0.3:
            await self._store(client, prompt)
        elif dice < 0.8:
            await self._load(client, prompt)
        else:
            await super()._operation(client)

    async def _store(self, client: SimClient, prompt: Prompt) -> None:
        await client.store(prompt, first=0, shard=0, store_options=DEFAULT_OPTIONS, leave=0)

    async def _load(self, client: SimClient, prompt: Prompt) -> None:
        await client.load(
            prompt, have_tokens=0, work=None, wait_s=self.random.choice((0.5, 5.0)), share=False
        )

    async def _forget_and_load(self, client: SimClient, prompt: Prompt) -> None:
        if self.node is not None:
            self.node.evict(1.0)
        await self._load(client, prompt)

    async def _clear(self, client: SimClient) -> None:
        random, prompt = self.random, self.random.choice(self.draw.prompts)
        prefix = random.choice((None, prompt.namespace.digest, prompt.namespace.digest))
        other = random.choice([host for host in self.hosts.hosts if host is not self])
        around = random.choice(("nothing", "read", "read", "store", "clear", "again"))
        if around == "store":
            other.soon(0.005, other._store, prompt)
            await asyncio.sleep(random.random() * 0.01)
        elif around == "clear":
            other.soon(0.01, other._clear_alone, prefix)
        await self._clear_alone(client, prefix)
        if around in ("clear", "again"):
            await self._store(client, prompt)
        if around == "again":
            await self._clear_alone(client, prefix)
            await self._load(client, prompt)
        for _ in range(0 if around == "nothing" else 2):
            other.soon(random.choice((0.02, 0.5)), other._forget_and_load, prompt)

    async def _clear_alone(self, client: SimClient, prefix: bytes | None) -> None:
        await client.call(await client.link(), m.Clear(prefix), m.Done)

    def soon(
        self, within_s: float, work: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:

        def start() -> None:
            living = [client for client in self.clients if client.alive and not self.hosts.over]
            if living:
                client = self.random.choice(living)
                doing = client.loop.create_task(work(client, *args))
                self.tasks.append(doing)
                doing.add_done_callback(lambda done: done.cancelled() or done.exception())

        self.world.later(self.random.random() * within_s, start)

    def _start_node(self) -> None:
        super()._start_node()
        random, prompt = self.random, self.random.choice(self.draw.prompts)
        if self.num_nodes > 1 and random.random() < 0.7:
            for _ in range(2):
                self.soon(0.1, self._load, random.choice(self.draw.prompts))
        elif random.random() < 0.4:
            self.soon(0.01, self._store, prompt)
            other = random.choice([host for host in self.hosts.hosts if host is not self])
            other.soon(0.03, other._clear_alone, prompt.namespace.digest)
            self.soon(0.5, self._load, prompt)

    def _kill_node(self) -> None:
        if self.node is not None:
            self.node.kill()
            self.node = None
            self.world.note("host %d is down", self.number)
            away_s = self.random.choice((0.5, 2.0, 20.0)) * self.random.random()
            self.world.later(away_s, self._start_node)
            if self.random.random() < 0.8:
                other = self.random.choice([host for host in self.hosts.hosts if host is not self])
                other.soon(
                    away_s,
                    other._clear_alone,
                    self.random.choice((None, self.random.choice(self.draw.spaces).digest)),
                )

    def _fail(self) -> None:
        node, random = self.node, self.random
        tier = random.randrange(len(self.stores))
        if random.random() < 0.2:
            self.hosts.fail_store(self.stores[tier])
        elif node is not None:
            fault, rules = node.tiers[tier], draw_rules(random)
            if self.stores[tier].shared:
                rules = [rule for rule in rules if (rule.operation, rule.kind) not in _LIES]
            if self.hosts.central is not None:
                rules = [rule for rule in rules if rule.kind not in _DAMAGES]
            fault.rules = rules
            self.world.note("host %d: tier %d fails: %s", self.number, tier, rules)

            def works_again() -> None:
                fault.release()
                fault.rules = ()

            self.world.later(random.random() * 4.0, works_again)

    def _flip(self) -> None:
        if self.hosts.central is None:
            super()._flip()

    def _guards(self) -> list[Any]:
        return self.node.stack.guards if self.node is not None else []

    def end_trouble(self) -> None:
        self._end_trouble()

    def end_calls(self) -> None:
        if self.node is not None and not self.world.findings:
            self._end_calls(self.node)

    def rest(self, since: str) -> None:
        assert self.node is not None
        self._rest(self.node, f"host {self.number}: {since}")

    def clear_all(self) -> None:
        assert self.node is not None
        self.node.state.clear(None)
        self.node.move()

    def check_end(self) -> None:
        assert self.node is not None
        self.checker.check_pins()
        self.checker.check_baseline()
        for store, guard in zip(self.stores, self.node.stack.guards, strict=True):
            if not store.shared and store.values and not guard.config.read_only:
                self.world.find(
                    f"host {self.number}: {store.name} still has {len(store.values)} "
                    "values after a clear"
                )
        if self.hosts.central is not None:
            self._check_frames()

    def end_tier_worker(self) -> None:
        assert self.node is not None
        self._end_tier_worker(self.node)

    def _check_frames(self) -> None:
        assert self.node is not None
        counts = (
            self.node._tier_worker._metrics.as_dict() if self.node._tier_worker is not None else {}
        )
        damaged = [
            f"tier=tier-{number},"
            for number, store in enumerate(self.stores)
            if getattr(store, "is_damaged", False)
        ]
        bad = {
            name: count
            for name, count in counts.items()
            if name.startswith("kvhold_tier_bad_frames")
            and not any(tier in name for tier in damaged)
        }
        if bad:
            self.world.find(
                f"host {self.number}: damaged frames arrived, but no fault damaged them: {bad}"
            )


def draw_small(random: Random, *, seed: int) -> Draw:
    group = Group(layers=random.choice((1, 2)), planes=1, heads=1, head_dim=4, dtype="bfloat16")
    layout = Layout((group,), tokens_per_chunk=4, tail_tokens=random.choice((0, 1)))
    spaces = tuple(
        Namespace(f"model-{number}", layout) for number in range(random.choice((1, 1, 2)))
    )
    texts = [[number] * random.randrange(3, 12) for number in range(random.choice((1, 2, 3)))]
    base = draw(random, seed=seed)
    behind_bytes = random.choice((2_000, 1 << 20, 1 << 20))
    return replace(
        base,
        node=replace(base.node, write_behind_bytes=behind_bytes, quota_bytes=0),
        spaces=spaces,
        handovers=False,
        prompt_clears=False,
        spans=False,
        trouble=random.choice((0.0, 0.3, 1.0, 2.0)),
        prompts=tuple(space.prompt(text) for space in spaces for text in texts),
        pressure_s=random.choice((0.0, 0.2, 0.2, 0.5)),
    )


class Hosts:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random = world.random
        self.shared = Shared(world, Markers(world))
        self.central: SimCentral | None = None
        self.over = False
        base = draw_small(random, seed=world.seed)
        self.trouble = base.trouble
        if random.random() < 0.5:
            self.central = SimCentral(world, self.shared.markers)
            self.store: Any = self.central
        else:
            self.store = SimTierStore(
                "shared",
                random.choice((1 << 20, 1 << 20, 20_000)),
                _Values(self.shared.markers),
                shared=True,
            )
        self.hosts = [
            self._draw_host(number, base) for number in range(1, 1 + random.choice((2, 2, 2, 3)))
        ]

    def _draw_host(self, number: int, base: Draw) -> SimHost:
        random = self.random
        stores: list[Any] = [self.store]
        guards = [self._draw_guard(read_only=random.random() < 0.04)]
        if random.random() < 0.6:
            at = random.choice((0, 0, 1))
            stores.insert(at, SimTierStore(f"disk-{number}", 1 << 20))
            guards.insert(at, self._draw_guard(read_only=False))
        drawn = replace(
            base,
            node=replace(
                base.node,
                guards=tuple(replace(guard, name=f"tier-{at}") for at, guard in enumerate(guards)),
            ),
            num_clients=random.choice((1, 1, 2)),
            tasks_a_client=random.choice((1, 2)),
            operations=random.choice((8, 12, 24)),
            store_bytes=(),
        )
        return SimHost(self, number, drawn, self.shared, stores)

    def _draw_guard(self, *, read_only: bool) -> GuardConfig:
        return replace(
            draw_guard(self.random, 0),
            read_only=read_only,
            clears_check_s=self.random.choice((0.05, 0.5, 0.5, 5.0)),
        )

    def run(self) -> None:
        world = self.world
        if self.central is not None:
            self.central.start()
        for host in self.hosts:
            host.begin()
        if self.trouble:
            world.later(self.random.expovariate(self.trouble), self._trouble)
        world.run(lambda: all(host.has_ended() for host in self.hosts), most_s=120.0)
        if not world.findings:
            self._come_to_rest()

    def _trouble(self) -> None:
        if self.over:
            return
        dice = self.random.random()
        if dice < 0.25:
            self.random.choice(self.hosts)._kill_node()
        elif self.central is not None and dice < 0.75:
            self.central.trouble()
        else:
            self._lose_a_marker()
        self.world.later(self.random.expovariate(self.trouble), self._trouble)

    def _lose_a_marker(self) -> None:
        """Remove a marker that a running host can put again."""
        names = [name for name in self.shared.markers.names() if self._is_known(name)]
        if names:
            name = self.random.choice(names)
            if self.central is not None:
                self.central.lose(name)
            else:
                self.store.values.pop(name)

    def _is_known(self, name: bytes) -> bool:
        for host in self.hosts:
            if self._may_put(host):
                known = host.promise.known
                if any(
                    number >= number_of(name)[0]
                    for space, number in known.items()
                    if name.startswith(space)
                ):
                    return True
        return False

    def fail_store(self, store: Any) -> None:
        if isinstance(store, SimCentral):
            store.trouble()
            return
        store.down = True

        def works_again() -> None:
            store.down = False

        self.world.later(self.random.random() * 4.0, works_again)

    def _come_to_rest(self) -> None:
        world, self.over = self.world, True
        if self.central is not None:
            self.central.end_trouble()
        for step in self._steps():
            if world.findings:
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
        yield self._all_learn
        clearing = next((host for host in hosts if self._may_put(host)), None)
        if self.central is not None:
            yield self.central.rest
        for number in range(2 if clearing is not None else 0):
            assert clearing is not None
            yield clearing.clear_all
            for host in hosts:
                yield lambda host=host, number=number: host.rest(
                    f"host {clearing.number} has cleared all, {number + 1}"
                )
            yield self._all_learn
            for host in hosts:
                yield lambda host=host: host.rest("it has learned of that")
            if self.central is not None:
                yield self.central.rest
        if clearing is None:
            for host in hosts:
                yield host.clear_all
        for host in hosts:
            yield lambda host=host: host.rest("all was cleared")
        if clearing is not None:
            yield self._check_store
        for host in hosts:
            yield host.check_end
        for host in hosts:
            yield host.end_tier_worker
        if self.central is not None:
            yield self.central.check_end

    def _all_learn(self) -> None:
        def has_learned(host: SimHost) -> bool:
            known = host.promise.known
            return all(known.get(space, number) >= number for space, number in self._told().items())

        if not self.world.run(
            lambda: all(has_learned(host) for host in self.hosts), most_s=_REST_S
        ):
            late = [host.number for host in self.hosts if not has_learned(host)]
            self.world.find(
                f"hosts {late} do not learn of clears: "
                f"{[host.promise.known for host in self.hosts]}, {self._told()}"[:600]
            )

    def _told(self) -> dict[bytes, int]:
        told: dict[bytes, int] = {}
        spaces = {name[:16] for name in self.shared.markers.names()}
        for space in spaces:
            number = 0
            while self.shared.markers.up_to(space, number + 1) is not None:
                number += 1
            told[space] = number
        for host in self.hosts:
            if self._may_put(host):
                told |= {
                    space: max(number, told.get(space, 0))
                    for space, number in host.promise.known.items()
                }
        return told

    def _may_put(self, host: SimHost) -> bool:
        return (
            host.node is not None
            and not host._guards()[host.stores.index(self.store)].config.read_only
        )

    def _check_store(self) -> None:
        left = [name for name in self.store.values if not is_marker(name)]
        if left:
            self.world.find(
                f"the shared tier still has {len(left)} values after a clear of "
                f"everything, such as {left[0].hex()}"
            )
