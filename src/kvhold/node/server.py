"""The daemon: an arena, an index, and engines as clients, in one loop."""

import _thread
import asyncio
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from secrets import randbits

from kvhold import __version__
from kvhold.cache.chores import TURN_S
from kvhold.cache.scrub import Scrubber
from kvhold.cache.state import CacheState, new_state
from kvhold.cache.transfer.tier_worker import TierWorker, make_tier_worker
from kvhold.core.cleanup import on_error
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, NodeError
from kvhold.core.events_config import EventsConfig
from kvhold.core.metrics import Metrics, merged_samples
from kvhold.core.status import (
    NodeControlStatus,
    NodeEventsStatus,
    NodePeersStatus,
    NodeStatus,
    TiersStatus,
)
from kvhold.core.tracing import Tracer
from kvhold.core.turns import next_turn
from kvhold.memory.arena import Arena, Region, Toucher, default_arena_bytes
from kvhold.memory.host import resident_bytes
from kvhold.memory.placement import format_list, interleave, memory_nodes, parse_list
from kvhold.memory.slab import zone_bytes
from kvhold.net import messages as m
from kvhold.net.remote_memory import RemoteMemory
from kvhold.node.channel import plan_channel
from kvhold.node.connection import ClientConnection
from kvhold.node.control_process import ControlProcess
from kvhold.node.host import raise_descriptor_limit, run_when_woken
from kvhold.node.last_copies import evict_last_copies_last
from kvhold.node.listener import Listener
from kvhold.node.live_settings import LiveSettings
from kvhold.node.names import Names
from kvhold.node.otel import make_tracer
from kvhold.node.paths import clears_path, socket_path, tags_path
from kvhold.node.pauses import collect_all, collect_young
from kvhold.node.peer_thread import PeerThread
from kvhold.node.requirements import requirements_of
from kvhold.node.router_publisher import RouterPublisher
from kvhold.node.socket_lock import SocketLock, bind_own
from kvhold.tiers.bytes_by_age import BytesByAge
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from kvhold.tiers.ram import ADMITTED, Entry

log = logging.getLogger(__name__)

_WATCH_S = 1.0
_WATCHED_AT_ONCE = 16
_CLIENTS_A_PAGE = 32
_LEAST_CLIENTS = 8
# starting a thread may take 200 ms
_CHORES_AFTER_S = 1.0
_MOST_READ_BYTES = 256 << 10


class Node:
    _tier_worker: TierWorker | None = None
    _peers: PeerThread | None = None
    router_publisher: RouterPublisher | None = None
    _remote_memory: RemoteMemory | None = None
    _tracer: Tracer | None = None
    _control: ControlProcess | None = None

    def __init__(self, config: Config, *, idle_exit_s: float | None = None) -> None:
        """idle_exit_s: end after this time without clients

        Raises CapacityError, ConfigError, or NodeError: another node has the socket.
        """
        self.path = socket_path(config.node.socket)
        self._idle_exit_s = idle_exit_s
        self._lock = SocketLock(self.path, any_owner=config.node.any_owner)
        with on_error(self._lock.close):
            arena = Arena.create(
                config.ram_bytes or default_arena_bytes(), huge_pages=config.huge_pages
            )
        zones = memory_nodes() if config.node.numa == "near" else []
        self._prepare(config, arena, new_state(config, arena, numa_nodes=zones))
        self.state.turn_s = TURN_S
        with on_error(self.arena.close, self._lock.close):
            _place_arena(self.arena, config.node.numa)
            if config.control.in_node:
                self._control = ControlProcess(config, self.path)
            plan = plan_channel(config, self.arena)
            self._remote_memory = plan.memory
            if config.peers.listen:
                self._peers = PeerThread(config.peers, self.state, self._post, plan=plan)
            with on_error(self._drop_peers):
                self._publish_events(config.events)
                publisher = self.router_publisher
                self._tier_worker = make_tier_worker(
                    config,
                    self.state,
                    self._post,
                    clears_path(self.path) if config.tiers else None,
                    None if self._peers is None else self._peers.feed.note_on_disk,
                    plan,
                    None if publisher is None else publisher.note,
                    tags_path(self.path) if config.tiers else None,
                )
            with on_error(self._drop_peers, self._end_tier_worker):
                self._trace(config)
                evict_last_copies_last(config.peers, self.state, self._tier_worker)
        if self._peers is not None:
            self._announce_clears(self._peers.use(self._tier_worker))
        self._toucher = Toucher(self.arena.regions)
        self._scrubber = Scrubber(self.state, self._post, config.scrub_interval_s)
        self.settings = LiveSettings(config, self.state, self._scrubber)
        self._starting: threading.Event | None = None

    def _prepare(self, config: Config, arena: Arena, state: CacheState) -> None:
        self._config = config
        self.offers = requirements_of(config)
        self.arena = arena
        self.state = state
        self.metrics = state.metrics
        self.names = Names()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.connections: dict[ClientConnection, None] = {}
        self.numbers = count(1)
        self.run = randbits(60)
        self._most_clients = _LEAST_CLIENTS
        self._listener: Listener | None = None
        # from then on, clients' memory is not taken back
        self.is_ending = False
        self.incoming = memoryview(bytearray(_MOST_READ_BYTES))
        self._stopped = asyncio.Event()
        # None: the state
        self._busy: deque[ClientConnection | None] = deque()
        self._is_turning = False
        self._was_busy = False
        self.longest_turn_s = 0.0
        self._recent_turns_s = (0.0, 0.0)
        self._started_s = time.monotonic()
        self._empty_since_s = time.monotonic()

    async def serve(self, on_ready: Callable[["Node"], None] | None = None) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._most_clients = _most_clients(raise_descriptor_limit())
        run_when_woken()
        watch, chores = None, None
        try:
            self._listener = self._listen(loop)
            if self._peers is not None:
                self._peers.start()
            if self.router_publisher is not None:
                self.router_publisher.start()
            watch = loop.create_task(self._watch_clients())
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            chores = loop.call_later(_CHORES_AFTER_S, self._start_chores)
            if on_ready is not None:
                on_ready(self)
            await self._until_stopped()
        finally:
            if chores is not None:
                chores.cancel()
            if self._starting is not None:
                self._starting.wait()
            if watch is not None:
                watch.cancel()
            if self._control is not None:
                await loop.run_in_executor(None, self._control.close)
            if self._peers is not None:
                await loop.run_in_executor(None, self._peers.close)
            self.end_conversations()
            if self._listener is not None:
                self.path.unlink(missing_ok=True)
            self._toucher.stop()
            self._scrubber.stop()
            if self._tier_worker is not None:
                await loop.run_in_executor(None, self._end_tier_worker)
            if self._tracer is not None:
                await loop.run_in_executor(None, self._tracer.close)
            if self._remote_memory is not None:
                await loop.run_in_executor(None, self._remote_memory.close)
            if self.router_publisher is not None:
                await loop.run_in_executor(None, self.router_publisher.close)
            self.arena.close()
            self._lock.close()

    def _trace(self, config: Config) -> None:
        if self._tier_worker is None:
            return
        metrics, lock = Metrics(), threading.Lock()

        def count(result: str, num_spans: int) -> None:
            with lock:
                metrics.add("kvhold_spans", num_spans, result=result)

        self._tracer = make_tracer(config.otel, "kvhold-node", count)
        if self._tracer is not None:
            self._tier_worker.trace(self._tracer, metrics)

    def _publish_events(self, config: EventsConfig) -> None:
        if not config.publish:
            return
        self.router_publisher = RouterPublisher(config, Metrics())

        def note(what: str, entry: Entry) -> None:
            if self.router_publisher is not None:
                self.router_publisher.note(entry.key, 0, what == ADMITTED)

        self.state.watch_chunks(note)

    def _drop_peers(self) -> None:
        if self.router_publisher is not None:
            self.router_publisher.close()
        if self._peers is not None:
            self._peers.close()

    def _announce_clears(self, numbers: ClearNumbers | None) -> None:
        if numbers is None:
            return

        def announce(prefix: bytes, asked_s: float | None) -> None:
            numbers.advance(prefix, asked_s)
            numbers.announce(prefix)

        self.state.when_cleared = announce

    def _start_chores(self) -> None:
        """`Thread.start` blocks until the new one runs."""
        self._starting = threading.Event()
        _thread.start_new_thread(self._start_threads, (self._starting,))

    def _start_threads(self, started: threading.Event) -> None:
        try:
            self._toucher.start()
            self._scrubber.start()
            if self._remote_memory is not None:
                self._remote_memory.start()
            if self._control is not None:
                self._control.start()
        except RuntimeError as error:
            log.error(
                "the host has no more threads for this node (%s): the node does not touch "
                "pages ahead, does not check idle chunks, does not use NIXL, or has no API",
                error,
            )
        finally:
            started.set()

    def end_conversations(self) -> None:
        """Clients may still use their memory, so it is not reused."""
        self.is_ending = True
        if self._listener is not None:
            self._listener.close()
        for connection in sorted(self.connections, key=lambda one: one.number):
            connection.close("the node stops")

    def stop(self) -> None:
        self._stopped.set()

    def status(self) -> NodeStatus:
        now = time.monotonic()
        (recent_s, recent_cpu_s), self._recent_turns_s = self._recent_turns_s, (0.0, 0.0)
        tiers: TiersStatus = {}
        if self._tier_worker is not None:
            tiers = self._tier_worker.status()
        peers: NodePeersStatus = {}
        if self._peers is not None:
            peers = {"served_peers": self._peers.status()}
        events: NodeEventsStatus = {}
        if self.router_publisher is not None:
            events = {"router_events": self.router_publisher.status()}
        control: NodeControlStatus = {}
        if self._control is not None:
            control = {"control": self._control.status()}
        return {
            **self.state.status(),
            **tiers,
            **peers,
            **events,
            **control,
            "version": __version__,
            "protocol": m.PROTOCOL_VERSION,
            "pid": os.getpid(),
            "socket": str(self.path),
            "uptime_s": round(now - self._started_s, 3),
            "resident_bytes": resident_bytes(),
            "huge_pages": self.arena.huge,
            "arena_touched_bytes": self._toucher.touched_bytes,
            "scrub": self._scrubber.status(),
            "loop": {
                "longest_turn_s": round(self.longest_turn_s, 6),
                "recent_longest_turn_s": round(recent_s, 6),
                "recent_longest_turn_cpu_s": round(recent_cpu_s, 6),
            },
            "clients": [
                {
                    "name": c.session.name,
                    "pid": c.session.pid,
                    "silent_s": round(now - c.last_heard_s, 3),
                }
                for c in self.connections
                if c.session is not None
            ],
        }

    def measure(self) -> list[m.MetricSample]:
        sources = [self.metrics]
        if self._tier_worker is not None:
            sources += self._tier_worker.metrics
        if self._peers is not None:
            sources.append(self._peers.metrics)
        if self.router_publisher is not None:
            sources.append(self.router_publisher.metrics)
        return [
            m.MetricSample(sample.metric.name, sample.labels, sample.value, sample.counts)
            for sample in merged_samples(sources)
        ]

    def disks(self) -> dict[str, list[BytesByAge]]:
        return {} if self._tier_worker is None else self._tier_worker.held()

    @property
    def peers_address(self) -> str:
        return "" if self._peers is None else self._peers.address

    def move(self) -> None:
        if self._tier_worker is not None:
            self._tier_worker.submit(self.state.take_commands())
        if self.state.take_news():
            self._notify_all()
        if self.state.has_chores and None not in self._busy:
            self.go_on(None)

    def go_on(self, connection: ClientConnection | None) -> None:
        self._busy.append(connection)
        self._was_busy = True
        if not self._is_turning and self._loop is not None:
            self._is_turning = True
            self._loop.call_soon(self._turn)

    @staticmethod
    def now() -> tuple[float, float]:
        """Clock and CPU time of this thread, in seconds."""
        return time.perf_counter(), time.thread_time()

    def took(self, began: tuple[float, float]) -> None:
        now_s, now_cpu_s = self.now()
        turn_s, cpu_s = now_s - began[0], now_cpu_s - began[1]
        longest_s, longest_cpu_s = self._recent_turns_s
        if turn_s > longest_s or cpu_s > longest_cpu_s:
            self._recent_turns_s = max(turn_s, longest_s), max(cpu_s, longest_cpu_s)
            if turn_s > self.longest_turn_s:
                self.longest_turn_s = turn_s
                self.metrics.set("kvhold_loop_longest_turn_seconds", turn_s)

    def _turn(self) -> None:
        began = self.now()
        connection = self._busy.popleft()
        if connection is not None:
            connection.go_on()
        else:
            self.state.step()
            self.move()
            if self.state.take_news():
                self._notify_all()
        self._is_turning = bool(self._busy)
        if self._is_turning and self._loop is not None:
            self._loop.call_soon(self._turn)
        self.took(began)

    def joined(self, connection: ClientConnection) -> None:
        self.connections[connection] = None

    def left(self, connection: ClientConnection) -> None:
        self.connections.pop(connection, None)
        if self._is_idle and not self._is_own(connection):
            self._empty_since_s = time.monotonic()
            collect_all()

    @property
    def _is_idle(self) -> bool:
        """Its own API is no client that it waits for."""
        return all(map(self._is_own, self.connections))

    def _is_own(self, connection: ClientConnection) -> bool:
        session = connection.session
        return (
            self._control is not None and session is not None and self._control.is_own(session.pid)
        )

    def _post(self, event: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._happen, event)

    def _happen(self, event: Callable[[], None]) -> None:
        began = self.now()
        event()
        self.move()
        self._notify_all()
        self.took(began)

    def _notify_all(self) -> None:
        for connection in self.connections:
            connection.notify()

    def _end_tier_worker(self) -> None:
        if self._tier_worker is not None:
            self._tier_worker.close(drain_timeout_s=self.settings.drain_timeout_s)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> Listener:
        sock = bind_own(self.path)
        listener = Listener(sock, lambda: ClientConnection(self), self._refusal)
        try:
            listener.start(loop)
        except OSError as error:
            listener.close()
            raise NodeError(f"node.socket: cannot listen on {self.path}: {error}") from None
        return listener

    def _refusal(self) -> str | None:
        if len(self.connections) < self._most_clients:
            return None
        self.metrics.add("kvhold_protocol_errors", reason="too many")
        self.metrics.add("kvhold_connections", result="refused")
        return (
            f"the node has {len(self.connections)} clients, as many as its descriptors allow; "
            "raise `ulimit -n` and restart it"
        )

    async def _watch_clients(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            collect_young(may_look=not self._was_busy and not self._busy)
            self._was_busy = False
            for number, connection in enumerate(list(self.connections), 1):
                try:
                    connection.drop_if_dead()
                except Exception:
                    log.exception("a client could not be checked")
                if number % _WATCHED_AT_ONCE == 0:
                    await next_turn()

    def clients(self, first: int) -> m.ClientList:
        known = sorted(
            (c for c in self.connections if c.session is not None and c.number >= first),
            key=lambda c: c.number,
        )
        return m.ClientList(
            [c.describe() for c in known[:_CLIENTS_A_PAGE]], more=len(known) > _CLIENTS_A_PAGE
        )

    def kick(self, number: int, pid: int) -> m.ClientList:
        kicked = [
            c
            for c in self.connections
            if c.session is not None and (c.number == number if number else c.session.pid == pid)
        ]
        ended = [c.describe() for c in kicked]
        for connection in kicked:
            connection.kick()
        return m.ClientList(ended)

    def departed(self, run: int, number: int, pid: int) -> None:
        for connection in list(self.connections):
            if (
                run == self.run
                and connection.number == number
                and connection.session is not None
                and connection.session.pid == pid
            ):
                connection.depart()

    async def _until_stopped(self) -> None:
        while not self._stopped.is_set():
            try:
                await asyncio.wait_for(
                    self._stopped.wait(), timeout=1.0 if self._idle_exit_s is not None else None
                )
            except TimeoutError:
                idle_s = time.monotonic() - self._empty_since_s
                idle = self._is_idle and idle_s > (self._idle_exit_s or 0)
                if idle:
                    log.info("no clients for %.0f s: ending", self._idle_exit_s)
                    return


def _most_clients(descriptors: int) -> int:
    """One per descriptor, less those for tiers, log and /proc."""
    return max(_LEAST_CLIENTS, descriptors - max(64, descriptors // 8))


def _place_arena(arena: Arena, numa: str) -> None:
    nodes = memory_nodes()
    if numa == "near":
        _place_zones(arena, nodes)
        return
    # an engine that starts a node names its NUMA nodes
    if numa in ("spread", "engine"):
        if len(nodes) < 2:
            return
        wanted = nodes
    else:
        try:
            wanted = parse_list(numa)
        except ValueError as error:
            raise ConfigError(
                f"node.numa = {numa!r}: spread, near, engine, or a list of NUMA nodes such as "
                f"0,1 ({error})"
            ) from None
        if not wanted or not set(wanted) <= set(nodes):
            raise ConfigError(
                f"node.numa = {numa!r}: the NUMA nodes with memory here are "
                f"{format_list(nodes) or 'not known'}"
            )
    if not interleave(arena.regions, wanted):
        log.warning("the host refuses to spread the arena over NUMA nodes %s", format_list(wanted))


def _place_zones(arena: Arena, nodes: Sequence[int]) -> None:
    if len(nodes) < 2:
        return
    nbytes = zone_bytes(arena.nbytes, len(nodes))
    for region in arena.regions:
        for zone, node in enumerate(nodes):
            part = Region(region.address + zone * nbytes, nbytes, region.writable)
            if not interleave([part], [node]):
                log.warning("the host refuses to place a part of the arena on NUMA node %d", node)
