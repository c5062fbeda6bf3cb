"""The daemon of one host: an arena, an index, and engines that are its clients.

One loop in one thread serves the clients. Long work takes several turns, and the loop serves
sockets between these. Other threads fault in the arena, scrub idle chunks, and use the lower tiers.
Engines map the arena and copy.

The Unix socket has mode 0600 and serves only the node's user.
"""

import _thread
import asyncio
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from secrets import randbits
from typing import Any

from kvhold import __version__
from kvhold.cache.chores import Running
from kvhold.cache.scrub import Scrubber
from kvhold.cache.state import CacheState, new_state
from kvhold.cache.tier_worker import TierWorker, make_tier_worker
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, NodeError, ProtocolError
from kvhold.memory.arena import Arena, Toucher, default_arena_bytes
from kvhold.memory.host import resident_bytes
from kvhold.memory.placement import format_list, interleave, memory_nodes, parse_list
from kvhold.net import messages as m
from kvhold.net.wire import Decoder, Splitter, encode, split_number
from kvhold.node.host import raise_descriptor_limit
from kvhold.node.listener import EXHAUSTED, Listener, no_descriptor
from kvhold.node.names import Names
from kvhold.node.paths import clears_path, lock_path, open_beside, prepare_folder, socket_path
from kvhold.node.pauses import collect_all, collect_young
from kvhold.node.peers import Peer, ProcessEnd
from kvhold.node.requirements import check, requirements_of, unpack
from kvhold.node.session import Session
from kvhold.tiers.files.safe import Unsafe

log = logging.getLogger(__name__)

_HELLO_WITHIN_S = 5.0
_WATCH_S = 1.0
_WATCHED_AT_ONCE = 16
_CLIENTS_A_PAGE = 32
_LEAST_CLIENTS = 8
_MOST_SAID = 900
# a new thread may take 200 ms to start, and clients wait for the node
_CHORES_AFTER_S = 1.0
_LOCK_ATTEMPTS = 100
_LOCK_PAUSE_S = 0.002
_MOST_READ_BYTES = 256 << 10
_MAX_UNREAD_BYTES = 16 << 20
_UNASKED = 0
_hello_decoder: Decoder[m.Hello] = Decoder(m.Hello)
_request_decoder: Decoder[m.Request] = Decoder(m.Request)


class Node:
    _tier_worker: TierWorker | None = None

    def __init__(self, config: Config, *, idle_exit_s: float | None = None) -> None:
        """Take the socket's lock, and create arena, state and tier worker.

        idle_exit_s: end after this time without clients

        Raises CapacityError, ConfigError, or NodeError: another node has the socket.
        """
        self.path = socket_path(config.node.socket)
        self._idle_exit_s = idle_exit_s
        self._lock = _SocketLock(self.path, any_owner=config.node.any_owner)
        try:
            arena = Arena.create(
                config.ram_bytes or default_arena_bytes(), huge_pages=config.huge_pages
            )
        except BaseException:
            self._lock.close()
            raise
        self._prepare(config, arena, new_state(config, arena))
        try:
            _place_arena(self.arena, config.node.numa)
            self._tier_worker = make_tier_worker(
                config, self.state, self._post, clears_path(self.path) if config.tiers else None
            )
        except BaseException:
            self.arena.close()
            self._lock.close()
            raise
        self._toucher = Toucher(self.arena.regions)
        self._scrubber = Scrubber(self.state, self._post, config.scrub_interval_s)
        self._starting: threading.Event | None = None

    def _prepare(self, config: Config, arena: Arena, state: CacheState) -> None:
        self._config = config
        self.offers = requirements_of(config)
        self.arena = arena
        self.state = state
        self.metrics = state.metrics
        self.names = Names()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.connections: set[_Connection] = set()
        self.numbers = count(1)
        self.run = randbits(60)  # tells client numbers of two nodes apart
        self._most_clients = _LEAST_CLIENTS
        self._listener: Listener | None = None
        # once True, no client's memory is taken back: it may be in use
        self.is_ending = False
        self.incoming = memoryview(bytearray(_MOST_READ_BYTES))
        self._stopped = asyncio.Event()
        # waiting connections; None: the state
        self._busy: deque[_Connection | None] = deque()
        self._is_turning = False
        self._was_busy = False
        self.longest_turn_s = 0.0
        self._recent_turns_s = (0.0, 0.0)
        self._started_s = time.monotonic()
        self._empty_since_s = time.monotonic()

    async def serve(self, on_ready: Callable[["Node"], None] | None = None) -> None:
        """Raises NodeError: cannot listen."""
        loop = self._loop = asyncio.get_running_loop()
        self._most_clients = _most_clients(raise_descriptor_limit())
        watch, chores = None, None
        try:
            self._listener = self._listen(loop)
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
            self.end_conversations()
            if self._listener is not None:
                self.path.unlink(missing_ok=True)
            self._toucher.stop()
            self._scrubber.stop()
            if self._tier_worker is not None:
                await loop.run_in_executor(None, self._end_tier_worker)
            self.arena.close()
            self._lock.close()

    def _start_chores(self) -> None:
        """Start the threads from another thread: `Thread.start` blocks until the new one runs."""
        self._starting = threading.Event()
        _thread.start_new_thread(self._start_threads, (self._starting,))

    def _start_threads(self, started: threading.Event) -> None:
        try:
            self._toucher.start()
            self._scrubber.start()
        except RuntimeError as error:
            log.error(
                "the host has no more threads for this node (%s): it touches no pages "
                "ahead, or compares no idle chunks",
                error,
            )
        finally:
            started.set()

    def end_conversations(self) -> None:
        """Clients' memory is not reused: they may still use it."""
        self.is_ending = True
        if self._listener is not None:
            self._listener.close()
        for connection in sorted(self.connections, key=lambda one: one.number):
            connection.close("the node stops")

    def stop(self) -> None:
        self._stopped.set()

    def status(self) -> dict[str, Any]:
        now = time.monotonic()
        (recent_s, recent_cpu_s), self._recent_turns_s = self._recent_turns_s, (0.0, 0.0)
        return (
            self.state.status()
            | (self._tier_worker.status() if self._tier_worker is not None else {})
            | {
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
        )

    def move(self) -> None:
        if self._tier_worker is not None:
            self._tier_worker.submit(self.state.take_commands())
        if self.state.has_chores and None not in self._busy:
            self.go_on(None)

    def go_on(self, connection: "_Connection | None") -> None:
        self._busy.append(connection)
        self._was_busy = True
        if not self._is_turning and self._loop is not None:
            self._is_turning = True
            self._loop.call_soon(self._turn)

    def took(self, began: tuple[float, float]) -> None:
        now_s, now_cpu_s = _now()
        turn_s, cpu_s = now_s - began[0], now_cpu_s - began[1]
        longest_s, longest_cpu_s = self._recent_turns_s
        if turn_s > longest_s or cpu_s > longest_cpu_s:
            self._recent_turns_s = max(turn_s, longest_s), max(cpu_s, longest_cpu_s)
            if turn_s > self.longest_turn_s:
                self.longest_turn_s = turn_s
                self.metrics.set("kvhold_loop_longest_turn_seconds", turn_s)

    def _turn(self) -> None:
        began = _now()
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

    def joined(self, connection: "_Connection") -> None:
        self.connections.add(connection)

    def left(self, connection: "_Connection") -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty_since_s = time.monotonic()
            collect_all()

    def _post(self, event: Callable[[], None]) -> None:
        """Called in the tier worker's thread, which may outlive the loop."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._happen, event)

    def _happen(self, event: Callable[[], None]) -> None:
        began = _now()
        event()
        self.move()
        self._notify_all()
        self.took(began)

    def _notify_all(self) -> None:
        for connection in self.connections:
            connection.notify()

    def _end_tier_worker(self) -> None:
        if self._tier_worker is not None:
            self._tier_worker.close(drain_timeout_s=self._config.drain_timeout_s)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> Listener:
        _remove_stale(self.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener = Listener(sock, lambda: _Connection(self), self._refusal)
        try:
            # The file gets the socket's mode: other users can never connect. A umask would affect
            # other threads.
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(str(self.path))
            listener.start(loop)
        except OSError as error:
            listener.close()
            raise NodeError(f"node.socket: cannot listen on {self.path}: {error}") from None
        return listener

    def _refusal(self) -> str:
        """Return the reason, or "" if another client fits."""
        if len(self.connections) < self._most_clients:
            return ""
        self.metrics.add("kvhold_protocol_errors", reason="too many")
        self.metrics.add("kvhold_connections", result="refused")
        return (
            f"the node has {len(self.connections)} clients, as many as its descriptors allow; "
            "raise `ulimit -n` and restart it"
        )

    async def _watch_clients(self) -> None:
        """Drop dead processes' connections: a forked child may keep the socket open."""
        while True:
            await asyncio.sleep(_WATCH_S)
            collect_young(may_look=not self._was_busy and not self._busy)
            self._was_busy = False
            for number, connection in enumerate(list(self.connections), 1):
                try:
                    connection.drop_if_dead()
                except Exception:  # one client's bug must not end the watch
                    log.exception("a client could not be looked after")
                if number % _WATCHED_AT_ONCE == 0:
                    await asyncio.sleep(0)

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
        """Ignored for another process's client."""
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
                idle = not self.connections and time.monotonic() - self._empty_since_s > (
                    self._idle_exit_s or 0
                )
                if idle:
                    log.info("no clients for %.0f s: ending", self._idle_exit_s)
                    return


class _Connection(asyncio.BufferedProtocol):
    """One client's connection: bytes to messages, messages to the session, answers to bytes.

    A client that breaks the rules is disconnected. With a lease or a reservation it may
    still be writing: then its requests are ignored, and its memory is taken back after it closes
    its end.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.number = next(node.numbers)
        self._peer: Peer | None = None
        self._process_end: ProcessEnd | None = None
        self._is_closed = False
        self._has_departed = False
        self._splitter = Splitter(m.MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._waiting: deque[bytes] = deque()
        self._answering: Running[m.Answer] | None = None
        self._answering_number = 0
        self.session: Session | None = None
        self.last_heard_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._join(transport, Peer.of(transport.get_extra_info("socket")))

    def _join(self, transport: asyncio.Transport, peer: Peer) -> None:
        self._transport, self._peer = transport, peer
        self._node.joined(self)
        if self._node.is_ending:  # accepted just before the listener closed
            transport.close()
        elif self._peer.uid != os.getuid():
            self._refuse(
                f"this node serves user {os.getuid()} alone; you are user {self._peer.uid}",
                "foreign user",
            )
        else:
            self._hello_timer = asyncio.get_running_loop().call_later(
                _HELLO_WITHIN_S, self._refuse, "no Hello", "no hello"
            )

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._node.incoming

    def buffer_updated(self, nbytes: int) -> None:
        self.last_heard_s = time.monotonic()
        if self._is_over():
            return
        began, was_busy = _now(), self._is_busy()
        try:
            answered = False
            for body in self._splitter.feed(self._node.incoming[:nbytes]):
                if self._is_over():
                    return
                if self.session is None:
                    self._greet(_hello_decoder.decode(body))
                elif answered or self._is_busy():  # in order, each in its own turn
                    self._waiting.append(bytes(body))
                else:
                    answered = True
                    self._answer(body)
        except ProtocolError as error:
            self._refuse(str(error), "bad message")
        # a bug ends one connection, not the node, and frees no used memory
        except Exception:
            log.exception("a request failed")
            self._refuse("the node failed; its log says why", "internal error")
        finally:
            if self._is_busy() and not was_busy and self._transport is not None:
                self._transport.pause_reading()
                self._node.go_on(self)
            self._node.took(began)

    def go_on(self) -> None:
        if not self._is_over():
            try:
                self._go_on()
            except ProtocolError as error:
                self._refuse(str(error), "bad message")
            except Exception:
                log.exception("a request failed")
                self._refuse("the node failed; its log says why", "internal error")
        if self._is_over():
            self._stop_answering()
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()  # to notice the client's end

    def _go_on(self) -> None:
        if self._answering is None:
            self._answer(self._waiting.popleft())
        elif self._answering.is_done:  # encoding a large answer takes its own turn
            answer, self._answering = self._answering.result, None
            self._send(answer, self._answering_number)
            self._node.move()
        else:
            self._answering.step()
            self._node.move()
        if self._is_over():
            return
        if self._is_busy():
            self._node.go_on(self)
        elif self._transport is not None:
            self._transport.resume_reading()

    def _is_busy(self) -> bool:
        return self._answering is not None or bool(self._waiting)

    def _answer(self, body: memoryview | bytes) -> None:
        assert self.session is not None
        number, request = split_number(body)
        answer = self.session.answer(_request_decoder.decode(request))
        if isinstance(answer, Running):
            self._answering, self._answering_number = answer, number
        else:
            self._send(answer, number)
        self._node.move()

    def _stop_answering(self) -> None:
        self._waiting.clear()
        if self._answering is not None:
            self._answering.close()
            self._answering = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._stop_answering()
        self._is_closed = True
        if (
            self._process_end is not None
            and not self._has_departed
            and self.session is not None
            and self.session.touches_memory
        ):
            log.info(
                "client %s (pid %d) has closed its connection; a device may still copy "
                "until it has ended",
                *self._who,
            )
            self._process_end.then(self._leave)
        else:
            self._leave()

    def depart(self) -> None:
        """Allow the client's memory to be taken back while its process lives."""
        self._has_departed = True
        if self._is_closed:
            self._leave()

    def _leave(self) -> None:
        try:
            if self.session is not None and not self._node.is_ending:
                self.session.gone()
                self._node.move()
                log.info("client %s (pid %d) left", *self._who)
        finally:
            self._stop_watching()
            self._node.left(self)

    def _watch_process(self) -> None:
        assert self._peer is not None
        assert self._transport is not None
        if self._process_end is None:
            self._process_end = self._peer.watch(self._transport.get_extra_info("socket"))

    def _stop_watching(self) -> None:
        if self._process_end is not None:
            self._process_end.close()
            self._process_end = None

    @property
    def _who(self) -> tuple[str, int]:
        return ("a client", 0) if self.session is None else (self.session.name, self.session.pid)

    def notify(self) -> None:
        if self.session is not None and not self._is_over() and self.session.take_news():
            self._send(m.News(), _UNASKED)

    def describe(self) -> m.ClientInfo:
        assert self.session is not None
        held = self._node.state.held_by(self.session)
        return m.ClientInfo(
            number=self.number,
            name=self.session.name,
            pid=self.session.pid,
            alive=self._peer is None or not self._peer.has_ended(),
            silent_s=round(time.monotonic() - self.last_heard_s, 3),
            hits=held.tickets,
            leases=held.leases,
            reservations=held.reservations,
            nbytes=held.nbytes,
            ended=self._draining,
            device=self.session.uses_device,
            pinned_bytes=self.session.pinned_bytes,
        )

    def kick(self) -> None:
        """Let others write the chunks that the client has reserved.

        Its memory stays its own until it closes its end or its process ends.
        """
        if self.session is not None:
            self._node.state.give_up(self.session)
        self._refuse("this client was ended by `kvhold kick`", "kicked")

    def drop_if_dead(self) -> None:
        """Not if a device copies: a child may keep the device open, too."""
        if self._process_end is not None:
            return
        if (
            self._peer is not None
            and self._transport is not None
            and not self._transport.is_closing()
            and self._peer.has_ended()
        ):
            name = self.session.name if self.session is not None else "a client"
            log.info(
                "the process of %s (pid %d) has ended, and a child of it keeps its socket",
                name,
                self._peer.pid,
            )
            self._transport.abort()

    def close(self, why: str) -> None:
        log.debug("closing a connection: %s", why)
        self._stop_watching()
        if self._transport is not None:
            self._transport.close()

    def _is_over(self) -> bool:
        return self._draining or self._transport is None or self._transport.is_closing()

    def _greet(self, hello: m.Hello) -> None:
        if hello.magic != m.MAGIC:
            raise ProtocolError(
                "this is a kvhold node's socket; the first message must be a kvhold Hello"
            )
        if hello.version != m.PROTOCOL_VERSION:
            self._refuse(
                f"the node (kvhold {__version__}) speaks protocol {m.PROTOCOL_VERSION}, "
                f"the client {hello.version}; "
                f"install the same kvhold on both sides, then restart the node (kvhold stop)",
                "version",
            )
            return
        try:
            different = "; ".join(check(unpack(hello.requires), self._node.offers))
        except NodeError as error:
            self._refuse(str(error)[:_MOST_SAID], "mismatch")
            return
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._splitter.most_bytes = m.MAX_MESSAGE_BYTES
        arena = self._node.arena
        try:
            self._welcome(
                m.Welcome(
                    m.PROTOCOL_VERSION,
                    __version__,
                    os.getpid(),
                    arena.nbytes,
                    arena.huge,
                    different[:_MOST_SAID],
                    run=self._node.run,
                    number=self.number,
                )
            )
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self._refuse(no_descriptor(error), "too many")
            return
        pid = self._peer.pid if self._peer is not None else 0
        self.session = Session(
            self._node.state, hello, self._node, pid, watch_process=self._watch_process
        )
        self._node.metrics.add("kvhold_connections", result="accepted")
        log.info("client %s (pid %d) joined", self.session.name, self.session.pid)

    def _welcome(self, welcome: m.Welcome) -> None:
        """Raises OSError: no descriptor is left."""
        assert self._transport is not None
        # asyncio cannot send descriptors; the first bytes fit the buffer
        with (
            socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as raw,
            suppress(BrokenPipeError),
        ):
            socket.send_fds(raw, [encode(welcome)], [self._node.arena.fd])

    def _send(self, answer: m.Message, number: int) -> None:
        assert self._transport is not None
        self._transport.write(encode(answer, number))
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self._hang_up("it does not read its answers", "answers not read")

    def _refuse(self, reason: str, kind: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(
                encode(
                    m.Refused(reason, fatal=True), _UNASKED if self.session is not None else None
                )
            )
        self._hang_up(reason, kind)

    def _hang_up(self, reason: str, kind: str) -> None:
        log.warning("refused a client: %s", reason)
        self._node.metrics.add("kvhold_protocol_errors", reason=kind)
        self._node.metrics.add(
            "kvhold_connections", result="refused" if self.session is None else "lost"
        )
        if self._transport is None:
            return
        if self.session is not None and self.session.touches_memory:
            self._draining = True
            self._transport.resume_reading()
        elif self.session is not None and self._transport.get_write_buffer_size():
            # `close` would wait until the client reads, with its hits pinned
            self._transport.abort()
        else:
            self._transport.close()


def _most_clients(descriptors: int) -> int:
    """One descriptor each, less those for tiers, log and /proc."""
    return max(_LEAST_CLIENTS, descriptors - max(64, descriptors // 8))


def _place_arena(arena: Arena, numa: str) -> None:
    """Raises ConfigError: the setting names no NUMA node with memory."""
    nodes = memory_nodes()
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
                f"node.numa = {numa!r}: spread, engine, or a list of NUMA nodes such as "
                f"0,1 ({error})"
            ) from None
        if not wanted or not set(wanted) <= set(nodes):
            raise ConfigError(
                f"node.numa = {numa!r}: the NUMA nodes with memory here are "
                f"{format_list(nodes) or 'not known'}"
            )
    if not interleave(arena.regions, wanted):
        log.warning(
            "the host does not let the arena be spread over NUMA nodes %s", format_list(wanted)
        )


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _remove_stale(path: Path) -> None:
    """Raises NodeError: no socket. The caller holds the lock."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise NodeError(
                f"node.socket: {path} is there already, and is no socket; remove it or "
                "choose another path"
            )
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise NodeError(
            f"node.socket: cannot remove the old socket {path}: {error.strerror}"
        ) from None


def _lock(fd: int) -> None:
    """Raises BlockingIOError: a node has the lock.

    Tries for 0.2 s: a process that checks for a node (`start.py`) takes the lock for an instant.
    """
    for left in range(_LOCK_ATTEMPTS, 0, -1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left == 1:
                raise
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


class _SocketLock:
    """A file with the owner's pid, locked while the owner lives."""

    def __init__(self, path: Path, *, any_owner: bool = False) -> None:
        prepare_folder(path, any_owner=any_owner)
        self._file = lock_path(path)
        try:
            self._fd = open_beside(self._file, os.O_RDWR | os.O_CREAT)
        except Unsafe as error:
            raise NodeError(f"node.socket: {error}") from None
        except OSError as error:
            raise NodeError(
                f"node.socket: cannot write {self._file}: {error.strerror}; choose a place "
                "you can write"
            ) from None
        try:
            _lock(self._fd)
        except OSError as error:
            owner = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise NodeError(
                    f"node.socket: cannot lock {self._file}: {error.strerror}"
                ) from None
            raise NodeError(
                f"a node is running on {path} already (pid {owner}); use it, stop it, or "
                "set node.socket"
            ) from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        """The file stays: else two owners could lock two files of one name."""
        os.close(self._fd)
