"""The cache of this host's node, as one process sees it.

    with connect() as cache: ...                   # joins the node, or starts one
    NodeClient(path, name="vllm-worker")           # only joins

Meets `core.api.Cache`; safe from any thread. Each call has a deadline. A call that fails or comes too late breaks the connection: from
then on every call raises NodeError at once, at no cost, while a thread looks for the node in the background and joins it again. What a
caller was reading or writing in the arena stays mapped and stays its own until it has closed its loan or room, even then: the broken
connection is closed only after that, so the node never hands memory on that somebody still writes to.
"""

import logging
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvhold.core.api import Hit, Loan, Room
from kvhold.core.config import ClientConfig
from kvhold.core.errors import DeadlineExceeded, KVHoldError, NodeError, ProtocolError
from kvhold.core.keys import ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.memory.arena import Arena, Toucher
from kvhold.net import messages as m
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.paths import peer_user

log = logging.getLogger(__name__)

_answer_decoder: Decoder[m.Answer] = Decoder(m.Answer)
_greeting_decoder: Decoder[m.Welcome | m.Refused] = Decoder(m.Welcome | m.Refused)
Kind = TypeVar("Kind", bound=m.Message)


class NodeClient:
    """A connection that mends itself."""

    def __init__(
        self,
        path: Path,
        config: ClientConfig | None = None,
        *,
        name: str = "python",
        revive: Callable[[], None] | None = None,
    ) -> None:
        """path: the node's socket. revive: called before each attempt to join again, to start a node if need be; may raise NodeError.

        Raises NodeError when there is no node now, or it is not one of ours.
        """
        self.path = path
        self._config = config or ClientConfig()
        self._name = name
        self._revive = revive
        self._layouts: dict[bytes, Layout] = {}
        self._lock = threading.Lock()  # over which link is in use, and what a new one must be told
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._lost = threading.Event()
        self._link: _Link | None = _Link(path, name, self._config.connect_timeout_s)
        self._keeper = threading.Thread(target=self._keep, name="kvhold-keeper", daemon=True)
        self._keeper.start()

    @property
    def connected(self) -> bool:
        """Whether calls reach a node now."""
        return self._link is not None

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[arena bytes] of the node joined now. Loans and rooms carry their own: after a node has come back it is another one."""
        return self._current("arena").buffer

    def register(self, namespace: Namespace) -> None:
        """Make the layout known, now and whenever a node comes back."""
        with self._lock:
            self._layouts[namespace.layout.fingerprint] = namespace.layout
        self._call(m.Register(namespace.layout), m.Done, None)

    def lookup(self, query: Query, *, deadline_s: float | None = None) -> Hit:
        """The longest prefix that the node has, pinned."""
        link = self._current("lookup")
        found = self._call(m.Lookup(query), m.Found, deadline_s, link)
        return Hit(found.ticket, found.num_tokens, lambda: self._give_back(link, m.Release(found.ticket)) if found.ticket else None)

    def claim(self, ticket: int, shard: int = 0, *, first_chunk: int = 0, deadline_s: float | None = None) -> Loan | None:
        """Take over one shard's part of a hit; the ticket may come from another process."""
        link = self._current("claim")
        buffer = link.hold()
        lent: m.Answer | None = None
        try:
            lent = self._ask(m.Claim(ticket, shard, first_chunk), deadline_s, link)
        finally:
            if not isinstance(lent, m.Lent):
                link.let_go()
        if isinstance(lent, m.Gone):
            return None
        if not isinstance(lent, m.Lent):
            raise self._misunderstood(lent, link)
        return Loan(
            np.array(lent.offsets, dtype=np.int64),
            np.array(lent.num_tokens, dtype=np.int64),
            first_chunk,
            buffer,
            lambda: self._give_back(link, m.Release(lent.loan), held=True),
        )

    def reserve(self, layout: Layout, names: ChunkNames, shard: int = 0, *, deadline_s: float | None = None) -> Room:
        """Memory in the node's arena for what is missing."""
        link = self._current("reserve")
        buffer = link.hold()
        granted: m.Granted | None = None
        try:
            granted = self._call(m.Reserve(layout.fingerprint, names, shard), m.Granted, deadline_s, link)
        finally:
            if granted is None:
                link.let_go()
        room = granted.room
        return Room(
            np.array(granted.offsets, dtype=np.int64).reshape(len(layout.groups), len(names)),
            names.num_tokens(layout),
            buffer,
            lambda chunks: self._commit(link, room, chunks),
            lambda: self._give_back(link, m.Abandon(room) if room else None, held=True),
        )

    def clear(self, namespace: bytes | None = None, *, deadline_s: float | None = None) -> int:
        """Forget everything, or one namespace."""
        return self._call(m.Clear(namespace), m.Done, deadline_s).count

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """What `kvhold status` shows."""
        return self._call(m.Status(), m.Report, deadline_s).values

    def ping(self) -> None:
        """One round trip, for nothing else."""
        self._call(m.Ping(), m.Done, None)

    def stop_node(self) -> None:
        """Ask the node to end."""
        self._call(m.Stop(), m.Done, None)

    def close(self) -> None:
        """Leave the node; what was held here is given back. Idempotent."""
        with self._lock:
            self._closed.set()
            self._lost.set()
            link, self._link = self._link, None
        if link is not None:
            link.retire()
        if self._keeper is not threading.current_thread():
            self._keeper.join(timeout=self._config.connect_timeout_s + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _current(self, operation: str) -> "_Link":
        self._check_process()
        link = self._link
        if self._closed.is_set():
            raise NodeError(f"{operation}: this client is closed")
        if link is None:
            raise NodeError(f"{operation}: no node on {self.path} now; looking for it in the background")
        return link

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # two processes on one connection would read each other's answers
            raise NodeError("this client was made before the process forked; make one in each process")

    def _call(self, request: m.Message, expected: type[Kind], deadline_s: float | None, link: "_Link | None" = None) -> Kind:
        link = link or self._current(type(request).__name__.lower())
        answer = self._ask(request, deadline_s, link)
        if not isinstance(answer, expected):
            raise self._misunderstood(answer, link)
        return answer

    def _ask(self, request: m.Message, deadline_s: float | None, link: "_Link") -> m.Answer:
        self._check_process()
        operation, data = type(request).__name__.lower(), encode(request)
        try:
            answer = link.call(operation, data, deadline_s or self._config.call_timeout_s)
        except BaseException as error:  # a call cut short, be it by Ctrl-C, leaves its answer to be taken for the next one's
            self._break(link, str(error) or type(error).__name__)
            if isinstance(error, OSError):
                raise NodeError(f"{operation}: lost the node on {self.path}: {error}") from None
            raise
        if isinstance(answer, m.Refused):
            if answer.fatal:
                self._break(link, answer.reason)
            raise NodeError(f"{operation}: the node refused: {answer.reason}")
        return answer

    def _misunderstood(self, answer: m.Answer, link: "_Link") -> ProtocolError:
        self._break(link, "an answer of the wrong kind")
        return ProtocolError(f"the node answered with {type(answer).__name__}")

    def _commit(self, link: "_Link", room: int, chunks: Sequence[int]) -> None:
        if room and chunks:
            self._call(m.Commit(room, list(chunks)), m.Done, None, link)

    def _give_back(self, link: "_Link", request: m.Message | None, *, held: bool = False) -> None:
        """Never raises: on a broken link the node takes everything back by itself when the link closes."""
        if held:
            link.let_go()
        if request is not None and not link.retired:
            try:
                self._call(request, m.Done, None, link)
            except KVHoldError as error:
                log.debug("giving back: %s", error)

    def _break(self, link: "_Link", why: str) -> None:
        with self._lock:
            lost = self._link is link
            if lost:
                self._link = None
                self._lost.set()
        if lost:
            log.warning("lost the node on %s (%s); computing without it until it is back", self.path, why)
        link.retire()

    def _keep(self) -> None:
        """The keeper's thread: tries an idle connection now and then, and joins a lost node again."""
        while not self._closed.is_set():
            if self._link is not None:
                self._lost.wait(self._config.heartbeat_interval_s)
                self._beat()
            else:
                self._rejoin()

    def _beat(self) -> None:
        link = self._link
        if link is not None and time.monotonic() - link.last_heard_s >= self._config.heartbeat_interval_s:
            try:
                self._call(m.Ping(), m.Done, None, link)
            except KVHoldError as error:
                log.debug("heartbeat: %s", error)

    def _rejoin(self) -> None:
        link = None
        try:
            if self._revive is not None:
                self._revive()
            link = _Link(self.path, self._name, self._config.connect_timeout_s)
            self._introduce(link)
        except (OSError, KVHoldError) as error:
            log.debug("no node yet: %s", error)
            if link is not None:
                link.retire()
            self._closed.wait(self._config.reconnect_interval_s)

    def _introduce(self, link: "_Link") -> None:
        """Tell a new node every layout, those registered meanwhile included; then let the callers have it."""
        told: set[bytes] = set()
        while True:
            with self._lock:
                missing = [layout for fingerprint, layout in self._layouts.items() if fingerprint not in told]
                if not missing:
                    if self._closed.is_set():
                        link.retire()
                    else:
                        self._link = link
                        self._lost.clear()
                        log.info("joined the node on %s again", self.path)
                    return
            for layout in missing:
                link.call("register", encode(m.Register(layout)), self._config.call_timeout_s)
                told.add(layout.fingerprint)


class _Link:
    """One connection and its arena. Broken or closed, it lasts until nobody reads or writes the arena through it."""

    def __init__(self, path: Path, name: str, timeout_s: float) -> None:
        self._socket, welcome, fd = _join(path, name, timeout_s)
        self._arena_size = (welcome.arena_bytes, welcome.huge_pages)
        self._arena_fd = fd
        self._arena: Arena | None = None
        self._toucher: Toucher | None = None
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._talk = threading.Lock()
        self._count_lock = threading.Lock()
        self._held = 0  # readers and writers of the arena
        self._calls = 0
        self.retired = False
        self.last_heard_s = time.monotonic()

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The arena, mapped at its first use: tools that only ask for the status never do."""
        with self._count_lock:
            return self._mapped()

    def call(self, operation: str, request: bytearray, deadline_s: float) -> m.Answer:
        """One request and its answer. Raises OSError, ProtocolError, DeadlineExceeded; after any exception the link is of no more use."""
        until = time.monotonic() + deadline_s
        with self._count_lock:
            if self.retired:
                raise ConnectionError("the connection is closed")
            self._calls += 1
        try:
            if not self._talk.acquire(timeout=deadline_s):
                raise TimeoutError
            try:
                return self._converse(request, until)
            finally:
                self._talk.release()
        except TimeoutError:
            raise DeadlineExceeded(operation, deadline_s) from None
        finally:
            with self._count_lock:
                self._calls -= 1
                self._close_if_unused()

    def hold(self) -> npt.NDArray[np.uint8]:
        """One more reader or writer of the arena. Raises NodeError when it cannot be had."""
        with self._count_lock:
            buffer = self._mapped()
            self._held += 1
            return buffer

    def let_go(self) -> None:
        """One less."""
        with self._count_lock:
            self._held -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """No more calls; close as soon as nobody holds anything."""
        with self._count_lock:
            self.retired = True
            self._close_if_unused()

    def _mapped(self) -> npt.NDArray[np.uint8]:
        if self.retired:
            raise NodeError("the connection to the node is closed")
        if self._buffer is None:
            nbytes, huge = self._arena_size
            fd, self._arena_fd = self._arena_fd, -1  # `attach` takes it over, even where it fails
            if fd < 0:
                raise NodeError("the node's arena could not be mapped")
            self._arena = Arena.attach(fd, nbytes, huge)
            self._toucher = Toucher(self._arena.regions).start()
            self._buffer = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        return self._buffer

    def _close_if_unused(self) -> None:
        if not self.retired or self._held:
            return
        if self._calls:  # the last of them closes; those that wait for an answer need wait no longer
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            return
        self._socket.close()
        if self._toucher is not None:
            self._toucher.stop()
        self._buffer = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        elif self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1

    def _converse(self, request: bytearray, until: float) -> m.Answer:
        if self.retired:
            raise ConnectionError("the connection is closed")
        self._wait_until(until)
        self._socket.sendall(request)
        answer = _answer_decoder.decode(self._read(body_length(self._read(LENGTH_BYTES, until)), until))
        self.last_heard_s = time.monotonic()
        return answer

    def _wait_until(self, until: float) -> None:
        """What the socket does next ends then. Raises TimeoutError when that is past."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _read(self, nbytes: int, until: float) -> bytearray:
        data = bytearray(nbytes)
        with memoryview(data) as view:
            got = 0
            while got < nbytes:
                self._wait_until(until)
                count = self._socket.recv_into(view[got:])
                if not count:
                    raise ConnectionError("the node closed the connection")
                got += count
        return data


def _join(path: Path, name: str, timeout_s: float) -> tuple[socket.socket, m.Welcome, int]:
    """Connect and greet. Returns the socket, the node's welcome and the arena's descriptor. Raises NodeError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        if (uid := peer_user(sock)) != os.getuid():
            raise NodeError(f"the node on {path} belongs to user {uid}; you are user {os.getuid()}: run your own, on a socket of your own")
        sock.sendall(encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, name, os.getpid())))
        data, fds = _receive_with_descriptor(sock)
        while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + body_length(data):
            more = sock.recv(65536)
            if not more:
                raise ConnectionError("the connection was closed")
            data += more
        greeting = _greeting_decoder.decode(data[LENGTH_BYTES:])
        if isinstance(greeting, m.Refused):
            raise NodeError(f"the node on {path} refused: {greeting.reason}")
        if greeting.version != m.PROTOCOL_VERSION:
            raise NodeError(
                f"the node on {path} (kvhold {greeting.node}) speaks protocol {greeting.version}, this client {m.PROTOCOL_VERSION}; "
                f"install the same kvhold on both sides, then restart the node (kvhold stop)"
            )
        if not fds:
            raise ProtocolError("the node sent no arena")
        return sock, greeting, fds.pop()
    except (OSError, ProtocolError) as error:
        sock.close()
        raise NodeError(f"cannot join a node on {path}: {error}") from None
    except NodeError:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _receive_with_descriptor(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Bytes, and a descriptor if one came with them. `socket.recv_fds` would pass it on to every child, which keeps the arena alive."""
    fds = array("i")
    data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
