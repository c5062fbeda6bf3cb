"""A node, without the pages, socket, lock and signals of `Node`."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvhold.cache.state import CacheState
from kvhold.cache.transfer.tier_rules import clearable, copyable, reencodable
from kvhold.cache.transfer.tier_worker import TierWorker
from kvhold.core.config import Config
from kvhold.core.errors import NodeError
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import EVICTED
from kvhold.net import messages as m
from kvhold.net.wire import encode, split_number
from kvhold.node import connection as client_connection
from kvhold.node import server
from kvhold.node.listener import Listener
from kvhold.node.peers import ProcessEnd, SocketPeer
from kvhold.tiers.faults import FaultConfig, FaultTier
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.policies import LearnedPolicy, Policy, make_policy
from kvhold.tiers.ram import Entry, RamTier
from kvhold.tiers.stack import Stack
from kvhold_lab.simulation.checker import Checker
from kvhold_lab.simulation.listening import ListeningLoop, ListeningSocket
from kvhold_lab.simulation.scrub import SimScrubber
from kvhold_lab.simulation.store import SimTier, SimTierStore
from kvhold_lab.simulation.wire import SimTransport
from kvhold_lab.simulation.world import SimLoop, World


@dataclass(frozen=True)
class NodeDraw:
    arena_bytes: int
    quota_bytes: int
    policy: str
    write_behind_bytes: int
    event_buffer: int
    guards: tuple[GuardConfig, ...]
    turn_units: int
    drain_s: float
    stalled_after_s: float
    scrub_interval_s: float
    config: Config = field(default_factory=Config)


class SimArena:
    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.nbytes = nbytes
        self.huge = False
        self.buffer = memoryview(self.data)

    def view(self, offset: int, nbytes: int) -> memoryview:
        assert 0 <= offset <= offset + nbytes <= self.nbytes, "outside the arena"
        return self.buffer[offset : offset + nbytes]


class _SimJournal(ClearsJournal):
    def __init__(self, disk: list[str]) -> None:
        self._disk = disk
        super().__init__(Path("journal"))

    def _read(self) -> str:
        return "".join(self._disk)

    def _write(self) -> None:
        self._disk[:] = self._lines()


class ClientProcess(Protocol):
    def has_ended(self) -> bool: ...

    def when_ended(self, callback: Callable[[], object]) -> None: ...


class _SimProcessEnd(ProcessEnd):
    def __init__(self, process: ClientProcess, loop: SimLoop) -> None:
        self._process = process
        self._loop = loop
        self._closed = False

    def then(self, callback: Callable[[], None]) -> None:
        self._process.when_ended(partial(self._loop.call_soon, self._ended, callback))

    def close(self) -> None:
        self._closed = True

    def _ended(self, callback: Callable[[], None]) -> None:
        if not self._closed:
            callback()


@dataclass(frozen=True)
class _SimPeer(SocketPeer):
    process: ClientProcess
    node: "SimNode"

    def has_ended(self) -> bool:
        return not self.node.world.descriptors.are_short and self.process.has_ended()

    def watch(self, connection: Any) -> ProcessEnd:
        try:
            self.node.world.descriptors.take()
        except OSError as error:
            raise NodeError(f"it cannot be watched: {error}") from None
        self.node.world.descriptors.put_back()
        return _SimProcessEnd(self.process, self.node.loop)


class SimNode(server.Node):
    def __init__(
        self,
        world: World,
        checker: Checker,
        draw: NodeDraw,
        stores: list[SimTierStore],
        journal: list[str],
        number: int,
    ) -> None:
        """journal: shared by all nodes of the host"""
        self.world = world
        self.checker = checker
        self.number = number
        self.loop = world.new_loop(f"node-{number}")
        self.tier_worker_loop = world.new_loop(f"tiers-{number}")
        arena, metrics = SimArena(draw.arena_bytes), Metrics()
        ram = RamTier(
            arena,  # type: ignore[arg-type]
            _policy(draw.policy, world),
            metrics,
            quota_bytes=draw.quota_bytes,
            clock=world.wall,
        )
        state = CacheState(
            ram,
            metrics,
            num_tiers=len(draw.guards),
            write_behind_bytes=draw.write_behind_bytes,
            event_buffer=draw.event_buffer,
            stalled_after_s=draw.stalled_after_s,
            clock=lambda: world.now,
        )
        state.turn_units = draw.turn_units
        self._prepare(draw.config, arena, state)  # type: ignore[arg-type]
        self.run = world.random.getrandbits(60)
        self._loop = self.loop
        self.memory = checker.watch(number, state, arena.data)
        self.tiers = [
            FaultTier(self._make_tier(store), FaultConfig(seed=world.random.getrandbits(30)))
            for store in stores
        ]
        self._tier_worker = self._make_tier_worker(draw, journal) if draw.guards else None
        self.loop.create_task(self._watch_clients())
        self._most_clients = 16
        self.listening = ListeningSocket(world)
        self._listener = Listener(self.listening, lambda: _SimConnection(self), self._refusal)  # type: ignore[arg-type]
        self._listener.start(ListeningLoop(self.loop))  # type: ignore[arg-type]
        self.scrubber: SimScrubber | None = None
        if draw.scrub_interval_s:
            self.scrubber = SimScrubber(
                world, checker, state, self._post, number, draw.scrub_interval_s
            )
        checker.scrubbing = lambda: self._scrubbing

    @staticmethod
    def now() -> tuple[float, float]:
        """Real times are no part of a history, and slow."""
        return 0.0, 0.0

    def _make_tier(self, store: SimTierStore) -> Any:
        return SimTier(self.world, store, self.checker)

    def _all_tiers(self) -> list[Any]:
        return list(self.tiers)

    def _make_tier_worker(self, draw: NodeDraw, journal: list[str]) -> TierWorker:
        metrics = Metrics()
        guards = [
            Guard(tier, config, name=config.name, metrics=metrics)
            for tier, config in zip(self._all_tiers(), draw.guards, strict=True)
        ]
        stack = Stack(guards)
        self.stack = stack
        self.state.tier_names = [guard.name for guard in guards]
        self.state.reencodings.tiers = reencodable(stack)
        self.state.copies.tiers = copyable(stack)
        self.state.tier_clears.tiers = clearable(stack)
        return TierWorker(
            self.state,
            stack,
            metrics,
            self._post,
            loop=self.tier_worker_loop,
            journal=_SimJournal(journal),
        )

    @property
    def data(self) -> bytearray:
        return self.memory.data

    @property
    def _scrubbing(self) -> list[Entry]:
        return [entry for entry, _ in self.scrubber.held] if self.scrubber is not None else []

    def _post(self, event: Callable[[], None]) -> None:
        self.loop.call_soon(self._happen, event)

    def evict(self, share: float) -> None:
        ram: Any = self.state.ram
        for entry in list(ram._entries.values()):
            if (
                entry.committed
                and not ram.is_doomed(entry)
                and not ram._is_kept(entry.key)
                and self.world.random.random() < share
            ):
                ram.remove(entry, why=EVICTED)

    @property
    def settled(self) -> bool:
        state = self.state
        return (
            not self.connections
            and not state.has_chores
            and not state._clears
            and not len(state.prompt_clears)
            and not len(state.tier_clears)
            and not len(state._writes)
            and not state._searches._searches
            and not state._searches.num_arriving
            and not self._busy
            and not self._scrubbing
        )

    def end_gently(self, drain_s: float, ended: Callable[[], None]) -> None:
        def end(_: Any = None) -> None:
            self.kill()
            ended()

        def end_tier_worker() -> None:
            self.end_conversations()
            if self._tier_worker is None:
                self.world.later(0.001, end)
            else:
                ending = self.tier_worker_loop.create_task(self._tier_worker.end(drain_s))
                ending.add_done_callback(lambda done: self.world.later(0.0, end, done))

        self.loop.call_soon(end_tier_worker)

    def kill(self) -> None:
        state = self.state
        self.checker.node_died(clears_done=not state._clears and not len(state.prompt_clears))
        for connection in self.connections:
            if connection._transport is not None:
                connection._transport._end.close()  # type: ignore[attr-defined]
        assert self._listener is not None
        self._listener.close()
        self.world.kill(self.loop)
        self.world.kill(self.tier_worker_loop)
        if self.scrubber is not None:
            self.world.kill(self.scrubber.loop)


def _policy(name: str, world: World) -> Policy:
    return LearnedPolicy(lambda: world.now) if name == "learned" else make_policy(name)


class _SimConnection(client_connection.ClientConnection):
    def __init__(self, node: SimNode) -> None:
        super().__init__(node)
        self._sim = node
        self._asked: dict[int, tuple[m.Request, tuple[int, float]]] = {}

    def __hash__(self) -> int:
        return self.number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SimTransport)
        self._join(transport, _SimPeer(0, os.getuid(), 0, transport._end.process, self._sim))

    def _welcome(self, welcome: m.Welcome) -> None:
        assert self._transport is not None
        self._sim.world.descriptors.take()
        self._transport.write(encode(welcome))
        self._sim.world.descriptors.put_back()

    def _answer(self, body: memoryview | bytes) -> None:
        number, record = split_number(body)
        request = client_connection._request_decoder.decode(record)
        self._sim.world.note(
            "node <- %s %d: %s",
            self.session.name if self.session is not None else "?",
            number,
            request,
        )
        self._asked[number] = request, self._sim.checker.asked(request)
        if isinstance(request, m.Commit):
            self._sim.checker.committing(self.session, request.reservation, request.chunks)
        super()._answer(body)

    def _send(self, answer: m.Message, number: int) -> None:
        request, asked = self._asked.pop(number, (None, (0, 0.0)))
        if request is not None:
            self._sim.checker.answered(self.session, request, answer, asked)
            self._sim.world.note(
                "node -> %s %d: %s",
                self.session.name if self.session is not None else "?",
                number,
                answer,
            )
        super()._send(answer, number)
