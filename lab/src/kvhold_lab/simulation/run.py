import asyncio
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvhold.cache import chores, scrub
from kvhold.cache import events as events_module
from kvhold.cache import state as state_module
from kvhold.core.errors import KVHoldError
from kvhold.node import listener
from kvhold.tiers.policies.ghosts import Ghosts
from kvhold_lab.simulation.central import CENTRAL_SIZES
from kvhold_lab.simulation.checker import Checker
from kvhold_lab.simulation.client import Share, SimClient
from kvhold_lab.simulation.draw import (
    Draw,
    draw,
    draw_cost,
    draw_intent,
    draw_rules,
    draw_store_options,
)
from kvhold_lab.simulation.handovers import HandoverPromises, SimHandovers
from kvhold_lab.simulation.interruption import Interruption
from kvhold_lab.simulation.listening import SimOs
from kvhold_lab.simulation.node import SimNode
from kvhold_lab.simulation.places import operate_places
from kvhold_lab.simulation.spans import SimSpans
from kvhold_lab.simulation.store import SimTierStore
from kvhold_lab.simulation.world import World

if TYPE_CHECKING:
    from kvhold_lab.simulation.fleet import Fleet
    from kvhold_lab.simulation.hosts import Hosts

_PINS_EVERY_S = 0.3
_REST_S = 300.0
_GHOSTS = 1 << 12  # of the learned policy; the usual 9 MiB take long to clear


@dataclass(frozen=True)
class SeedResult:
    """steps: of all loops; digest: equal for equal histories"""

    seed: int
    operations: int
    steps: int
    findings: list[str]
    history: list[str]
    digest: int


def simulate(seed: int, *, trace: bool = False, hosts: int = 0) -> SeedResult:
    """trace: keep the history
    hosts: 0: by the seed
    """
    world = World(seed, keep_notes=trace)
    with _real_code_simulated(world):
        try:
            simulation = _simulation(world, hosts)
            simulation.run()
        except Exception as error:
            world.find(f"{type(error).__name__}: {error}")
            if trace:
                logging.getLogger(__name__).exception("the simulation failed")
        finally:
            world.end()
            simulation = None  # type: ignore[assignment]
    history = [
        f"{at:10.4f} {text % values if values else text}" for at, text, values in world.notes
    ]
    return SeedResult(
        seed,
        world.operations,
        world.steps,
        world.findings,
        history,
        hash((world.steps, world.now, world.random.random())),
    )


def _simulation(world: World, hosts: int) -> "Simulation | Hosts | Fleet":
    from kvhold_lab.simulation import fleet
    from kvhold_lab.simulation.hosts import EVERY, Hosts

    if hosts or world.seed % fleet.EVERY == fleet.AT:
        return fleet.Fleet(world, hosts)
    return Hosts(world) if world.seed % EVERY == 0 else Simulation(world)


class _Findings(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if "are not those that were stored" not in record.msg:
            self._world.find(
                f"logged: {record.getMessage()[:300]} "
                f"{type(error).__name__ if error else ''} {error or ''}"
            )


@contextmanager
def _real_code_simulated(world: World) -> Iterator[None]:
    log = logging.getLogger("kvhold")
    handler, level, propagate = _Findings(world), log.level, log.propagate
    outside: Any = listener
    chances: tuple[Any, ...] = (state_module, events_module)
    kept_chances = [each.randbits for each in chances]
    kept = chores._ONE_TURN_KEYS, chores.Running.step.__defaults__
    kept_ghosts, Ghosts.__init__.__defaults__ = Ghosts.__init__.__defaults__, (_GHOSTS,)
    kept_scrub, kept_os = scrub._BATCH_BYTES, outside.os
    for each in chances:
        each.randbits = world.random.getrandbits
    scrub._BATCH_BYTES, outside.os = world.random.choice((1, 1000)), SimOs(world.descriptors)
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    was_collecting, hook = gc.isenabled(), sys.unraisablehook
    from kvhold_lab.simulation.fleet_node import PeersSimulated

    peers = PeersSimulated(world)
    gc.disable()  # not part of a history
    sys.unraisablehook = lambda _: None  # for killed threads
    try:
        yield
    finally:
        CENTRAL_SIZES.restore()
        peers.restore()
        if was_collecting:
            gc.enable()
        sys.unraisablehook = hook
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
        for each, randbits in zip(chances, kept_chances, strict=True):
            each.randbits = randbits
        chores._ONE_TURN_KEYS, chores.Running.step.__defaults__ = kept
        Ghosts.__init__.__defaults__ = kept_ghosts
        scrub._BATCH_BYTES, outside.os = kept_scrub, kept_os


class Simulation:
    def __init__(
        self, world: World, drawn: Draw | None = None, checker: Checker | None = None
    ) -> None:
        self.world = world
        self.random = world.random
        self.draw = drawn if drawn is not None else draw(world.random, seed=world.seed)
        chores._ONE_TURN_KEYS = self.draw.one_turn_keys
        chores.Running.step.__defaults__ = (self.draw.node.turn_units,)
        self.checker = checker if checker is not None else Checker(world)
        self.handovers, self.spans = SimHandovers(world), SimSpans(world)
        if self.draw.handovers:
            self.checker.handovers = HandoverPromises(world)
        self.stores: list[Any] = [
            SimTierStore(f"tier-{number}", size)
            for number, size in enumerate(self.draw.store_bytes)
        ]
        self.journal: list[str] = []
        self.node: SimNode | None = None
        self.num_nodes = self.num_clients = 0
        self.stopping = False
        self.clients: list[SimClient] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.mailbox: list[Share] = []
        self.left = self.draw.operations
        self.over = False
        self.pins_every_s = _PINS_EVERY_S

    def run(self) -> None:
        self.begin()
        self.world.run(self.has_ended, most_s=120.0)
        if not self.world.findings:
            self._come_to_rest()

    def has_ended(self) -> bool:
        return self.left <= 0 and self._idle()

    def begin(self) -> None:
        world = self.world
        world.note("%s", self.draw)
        self._start_node()
        for _ in range(self.draw.num_clients):
            self._start_client()
        if self.draw.trouble:
            world.later(self.random.expovariate(self.draw.trouble), self._trouble)
        if self.draw.pressure_s:
            world.later(self.draw.pressure_s, self._evict)
        world.later(self.pins_every_s, self._look)

    def _idle(self) -> bool:
        return all(task.done() or task.get_loop().dead for task in self.tasks)  # type: ignore[attr-defined]

    def _start_node(self) -> None:
        if self.over and self.node is not None:
            return
        if self.world.descriptors.are_short:
            self.world.later(0.5, self._start_node)
            return
        self.num_nodes += 1
        self.node = self._make_node()
        self.world.note("node %d starts", self.node.number)

    def _make_node(self) -> SimNode:
        return SimNode(
            self.world, self.checker, self.draw.node, self.stores, self.journal, self.num_nodes
        )

    def _start_client(self) -> None:
        if self.over:
            return
        self.num_clients += 1
        client = SimClient(
            self.world, self.num_clients, self.checker, lambda: self.node, self.mailbox
        )
        self.clients.append(client)
        for _ in range(self.draw.tasks_a_client):
            self.tasks.append(client.loop.create_task(self._work(client)))

    async def _work(self, client: SimClient) -> None:
        while self.left > 0:
            self.left -= 1
            self.world.operations += 1
            operation = client.loop.create_task(self._interrupted(client))
            self.tasks.append(operation)
            await asyncio.wait((operation,))
            error = None if operation.cancelled() else operation.exception()
            if error is not None and not isinstance(error, KVHoldError):
                self.world.find(f"{client.name}: {type(error).__name__}: {error}")
            await asyncio.sleep(self.world.delay(0.02, slow=0.2, slow_s=1.0))

    async def _interrupted(self, client: SimClient) -> None:
        random = self.random
        if self.draw.trouble and random.random() < 0.15:
            await Interruption(
                self._operation(client),
                at=1 + int(random.expovariate(0.1)),
                early=random.random() < 0.5,
            )
        else:
            await self._operation(client)

    async def _operation(self, client: SimClient) -> None:
        random, prompt = self.random, self.random.choice(self.draw.prompts)
        if self.draw.handovers and random.random() < 0.3:
            await self.handovers.operate(client, prompt)
            return
        if self.draw.spans and random.random() < 0.3:
            await self.spans.operate(client, prompt)
            return
        if self.draw.prompt_clears and random.random() < 0.15:
            await client.clear_prompt(prompt, only_end=random.random() < 0.2)
            if random.random() < 0.7:
                wait_s = random.choice((0.0, 10.0))
                await client.load(prompt, have_tokens=0, work=None, wait_s=wait_s, share=False)
            return
        if await operate_places(self.draw, random, client, prompt):
            return
        dice = random.random()
        if dice < 0.34:
            first = random.randrange(prompt.num_whole + 1) if random.random() < 0.2 else 0
            shard = random.randrange(prompt.namespace.shards)
            for number in range(prompt.namespace.shards):
                if number == shard or random.random() < 0.8:
                    await client.store(
                        prompt,
                        first=first,
                        shard=number,
                        store_options=draw_store_options(random),
                        leave=random.choice((0, 0, 0.2, 1)),
                    )
        elif dice < 0.79:
            have = random.choice((0, 0, 0, 4))
            wait_s = random.choice((0.0, 0.5, 10.0))
            await client.load(
                prompt,
                have_tokens=have,
                work=draw_cost(random, prompt),
                wait_s=wait_s,
                share=random.random() < 0.3,
                intent=draw_intent(random, prompt) if self.draw.computing else None,
            )
        elif dice < 0.84:
            await client.take_share()
        elif dice < 0.88:
            await client.clear(random.choice((None, prompt.namespace.digest)))
        elif dice < 0.93:
            await client.prefetch(prompt)
        elif dice < 0.95:
            await client.flush(None)
        elif dice < 0.97 and self.draw.node.event_buffer:
            await client.watch(random.randrange(20))
        elif dice < 0.98 and self.stores:
            await client.reencode(
                f"tier-{random.randrange(len(self.stores))}",
                random.choice(("raw", "lossless")),
                random.random(),
            )
        elif dice < 0.985 and self.draw.trouble:
            await client.kick()
        else:
            await client.hang_up()

    def _look(self) -> None:
        if (
            self.node is not None
            and not self.node.loop.dead
            and not self.node._busy
            and not self.node.state.has_chores
        ):
            self.checker.check_pins()
        if not self.over:
            self.world.later(self.pins_every_s, self._look)

    def _trouble(self) -> None:
        if self.over:
            return
        random, world = self.random, self.world
        trouble = random.choice(
            (
                *(
                    self._fail,
                    self._fail,
                    self._fail,
                    self._fail,
                    self._kill_client,
                    self._kill_client,
                ),
                *(
                    self._stop_a_thread,
                    self._cancel,
                    self._cancel,
                    self._jump,
                    self._flip,
                    self._break_the_rules,
                    self._kill_node,
                ),
                *(self._flip_below, self._run_out_of_descriptors),
                *(self._stop_node, self._hurry, self._hurry),
            )
        )
        trouble()
        world.later(random.expovariate(self.draw.trouble), self._trouble)

    def _fail(self) -> None:
        random, node = self.random, self.node
        if not self.stores:
            return
        tier = random.randrange(len(self.stores))
        store = self.stores[tier]
        if random.random() < 0.2:
            store.down = True
            self.world.note("tier %d is down", tier)
        elif node is not None:
            node.tiers[tier].rules = draw_rules(random)
            self.world.note("tier %d fails: %s", tier, node.tiers[tier].rules)

        def works_again() -> None:
            store.down = False
            if node is not None:
                node.tiers[tier].release()
                node.tiers[tier].rules = ()
            self.world.note("tier %d works again", tier)

        self.world.later(random.random() * 4.0, works_again)

    def _evict(self) -> None:
        if self.over:
            return
        if self.node is not None:
            self.node.evict(self.random.choice((0.3, 1.0)))
        self.world.later(self.random.expovariate(1 / self.draw.pressure_s), self._evict)

    def _stop_a_thread(self) -> None:
        self.world.stall_one(self.random.choice((0.05, 1.0, 8.0)))

    def _jump(self) -> None:
        self.world.wall_offset_s += self.random.choice((-100.0, -2.0, 2.0, 100.0))
        self.world.note("the clock jumps")

    def _kill_node(self) -> None:
        if self.node is not None:
            self.node.kill()
            self.node = None
            self.world.note("the node is killed")
            self.world.later(self.random.random() * 2.0, self._start_node)

    def _run_out_of_descriptors(self) -> None:
        self.world.descriptors.run_out(self.random.choice((0, 0, 1, 3)))
        self.world.note("there are no descriptors")
        self.world.later(self.random.random() * 4.0, self.world.descriptors.abound)

    def _stop_node(self) -> None:
        node = self.node
        if node is not None:
            self.node, self.stopping = None, True
            self.world.note("the node is told to stop")

            def ended() -> None:
                self.stopping = False
                self.world.note("the node has stopped")
                self.world.later(self.random.random() * 2.0, self._start_node)

            node.end_gently(self.draw.node.drain_s, ended)

    def _hurry(self) -> None:
        if self.node is not None and self.stores:
            guard = self.random.choice(self.node.stack.guards)
            usual = self.draw.node.guards[self.node.stack.guards.index(guard)]
            probe_s, get_s, put_s = (10 ** self.random.uniform(-4, -1) for _ in range(3))
            guard.config = replace(
                usual, probe_timeout_s=probe_s, get_timeout_s=get_s, put_timeout_s=put_s
            )
            self.world.note("%s has tiny deadlines", guard.name)
            self.world.later(self.random.random() * 2.0, setattr, guard, "config", usual)

    def _break_the_rules(self) -> None:
        links = [
            link
            for client in self.clients
            if client.alive
            for link in client.links
            if not link.retired
        ]
        if links:
            self.random.choice(links).send_garbage()

    def _kill_client(self) -> None:
        living = [client for client in self.clients if client.alive]
        if living:
            client = self.random.choice(living)
            self.world.note("%s is killed", client.name)
            client.kill(self.random.choice((0.0, 0.0, 0.5, 20.0)))
            self.world.later(self.random.random(), self._start_client)

    def _cancel(self) -> None:
        running = [
            task
            for task in self.tasks
            if not task.done() and task.get_coro().__name__ == "_interrupted"  # type: ignore[union-attr]
        ]
        if running:
            self.random.choice(running).cancel()

    def _flip(self) -> None:
        if self.node is None:
            return
        entries = [entry for entry in self.node.state.ram._entries.values() if entry.committed]
        if entries:
            entry = self.random.choice(entries)
            self.checker.flipped.add((self.node.number, entry.offset))
            self.node.data[entry.offset + self.random.randrange(entry.nbytes)] ^= (
                1 << self.random.randrange(8)
            )
            self.world.note("a bit of %s at %d is flipped", entry.key.hex()[-16:], entry.offset)

    def _flip_below(self) -> None:
        stores = [
            store for store in self.stores if isinstance(store, SimTierStore) and store.values
        ]
        if stores:
            store = self.random.choice(stores)
            key = self.random.choice(list(store.values))
            value, expires_at = store.values[key]
            damaged = bytearray(value)
            last = len(damaged) if self.random.random() < 0.5 else 32
            damaged[-1 - self.random.randrange(min(last, len(damaged)))] ^= (
                1 << self.random.randrange(8)
            )
            store.values[key] = bytes(damaged), expires_at
            store.is_damaged = True
            self.world.note("a bit of %s in %s is flipped", key.hex()[-16:], store.name)

    def _come_to_rest(self) -> None:
        node = self._end_trouble()
        self._end_calls(node)
        self._rest(node, "the clients have left")
        self._check_scrubber(node)
        if not self.world.findings:
            self.checker.check_pins()
            node.state.clear(None)
            node.move()
            self._rest(node, "all was cleared")
        if not self.world.findings:
            self.checker.check_baseline()
            self._check_stores(node)
            self._end_tier_worker(node)

    def _end_trouble(self) -> SimNode:
        world, self.over = self.world, True
        world.may_stall = False
        self.world.descriptors.abound()
        for store in self.stores:
            store.down = False
            store.most_bytes = 1 << 30
        if not world.run(lambda: not self.stopping, most_s=_REST_S):
            world.find("the node does not stop")
        self.world.descriptors.abound()
        if self.node is None:
            self._start_node()
        node = self.node
        assert node is not None
        for fault in node.tiers:
            fault.rules = ()
            fault.release()
            fault._inner.hangs = 0.0  # type: ignore[attr-defined]
        world.note("the trouble is over")
        self.left = 0
        return node

    def _end_calls(self, node: SimNode) -> None:
        if not self.world.run(self._idle, most_s=_REST_S):
            self.world.find("a client's call does not end")
            return
        self._check_answers(node)
        for client in self.clients:
            if client.alive:
                client.exit()

    def _check_answers(self, node: SimNode) -> None:
        links = [
            link
            for client in self.clients
            if client.alive
            for link in client.links
            if link.node is node
        ]
        if not self.world.run(
            lambda: not any(link.conversation._calls for link in links if not link.retired),
            most_s=_REST_S,
        ):
            self.world.find("a call is never answered")
        elif not self.world.run(lambda: not self.checker.num_held(), most_s=_REST_S):
            self.world.find(
                f"clients hold nothing, but the node still holds for them {self.checker.num_held()}"
            )

    def _check_scrubber(self, node: SimNode) -> None:
        scrubber = node.scrubber
        if scrubber is None or self.world.findings:
            return
        enough = scrubber.passes + 2
        if not self.world.run(lambda: scrubber.passes >= enough, most_s=_REST_S):
            self.world.find("the scrubber does not complete its passes")
        self.checker.check_idle_chunks()

    def _rest(self, node: SimNode, since: str) -> None:
        def rests() -> bool:
            guards = node.stack.guards if node._tier_worker is not None else []
            owing = [
                guard
                for guard in guards
                if (
                    guard.clears.suppressed.pending
                    or guard.clears.garbage
                    or guard.chunk_clears.num_pending
                    or guard._removals.num_pending
                )
                and not guard.config.read_only
            ]
            return node.settled and not owing and not any(guard._stuck for guard in guards)

        if self.world.findings:
            return
        if not self.world.run(rests, most_s=_REST_S):
            state = node.state
            self.world.find(
                f"no rest after {since}: connections {len(node.connections)}, chores "
                f"{state.has_chores}, clears {state._clears}, "
                f"writes {len(state._writes)}, searches {len(state._searches._searches)}, "
                f"arriving {state._searches.num_arriving}"
            )

    def _check_stores(self, node: SimNode) -> None:
        guards = node.stack.guards if node._tier_worker is not None else []
        for store, guard in zip(self.stores, guards, strict=False):
            if store.values and not guard.config.read_only:
                self.world.find(
                    f"tier {store.name} still has {len(store.values)} values after a clear"
                )

    def _end_tier_worker(self, node: SimNode) -> None:
        if node._tier_worker is None:
            return
        ending = node.tier_worker_loop.create_task(node._tier_worker.end(self.draw.node.drain_s))
        if not self.world.run(ending.done, most_s=_REST_S):
            self.world.find("the tier worker does not end")
            return
        left = [task for task in node.tier_worker_loop.tasks if not task.done()]
        if left:
            self.world.find(f"tasks are left after the tier worker has ended: {left}"[:500])
