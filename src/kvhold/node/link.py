"""One connection to the node, and the arena that came with it.

    link = Link(path, "vllm-worker", timeout_s=5)
    answer = link.call(Ping(), deadline_s=1)
    buffer = link.hold() ... link.let_go()              # around every reading and writing of the arena

Several threads may call at once: requests are numbered, and each answer is matched to its caller. No thread is dedicated to reading: one
of the waiting callers reads for all. A late answer is dropped. If it granted a ticket, a loan or a room, the link returns the grant when
the answer arrives; the client's keeper calls `tend` to read late answers while no caller waits.

A broken or closed link lasts until no thread reads or writes the arena through it: the node takes memory back when the socket closes.
`client.py` builds a reconnecting client on it.
"""

import logging
import os
import select
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DeadlineExceeded, NodeError, NodeRefused, ProtocolError
from kvhold.memory.arena import Arena, Toucher
from kvhold.net import messages as m
from kvhold.net.wire import LENGTH_BYTES, Decoder, Splitter, body_length, encode, split_number
from kvhold.node.paths import peer_user

log = logging.getLogger(__name__)

_DESCRIPTORS = 1  # that come with a welcome
_READ_BYTES = 64 << 10  # read at once: all of most answers
_TOUCHED_BYTES = 4 << 30  # of each mapping, ahead of their use: 8 MiB of page tables at most, and an arena of the default size whole
_UNASKED = 0  # the number of what is no answer
_GRANTING = (m.Lookup, m.Claim, m.Reserve, m.Recode)  # others are questions: what their answers name, the caller has already
_MOST_NAME = 100  # characters: a Hello is short

_answer_decoder: Decoder[m.Answer] = Decoder(m.Answer)
_greeting_decoder: Decoder[m.Welcome | m.Refused] = Decoder(m.Welcome | m.Refused)


@dataclass(eq=False)
class _Call:
    """A request under way.

    data:   the bytes that are not sent yet
    grants: its answer gives the caller something that nobody returns if the caller never sees it
    keep:   send it even if its caller has given up
    late:   its caller has given up
    begun:  some of its bytes may be sent
    """

    data: memoryview
    grants: bool = False
    keep: bool = False
    late: bool = False
    begun: bool = False
    answer: m.Answer | None = None
    asked_s: float = field(default_factory=time.monotonic)


class _Mapping:
    """One mapping of the arena. The first pages are faulted in ahead, the others as they are used: their tables take memory, too."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._toucher = Toucher([region.first(_TOUCHED_BYTES) for region in arena.regions]).start()
        self.buffer: npt.NDArray[np.uint8] | None = np.frombuffer(arena.buffer, dtype=np.uint8)

    def close(self) -> None:
        """Unmap it, or have it go with its last view."""
        self._toucher.stop()
        self.buffer = None
        self._arena.close()


class Link:
    """One connection and its arena. Broken or closed, it lasts until nobody reads or writes the arena through it."""

    def __init__(self, path: Path, name: str, timeout_s: float, requires: bytes = b"") -> None:
        """requires: see `messages.Hello`. Raises NodeError; NodeRefused where the node does not serve this client."""
        self._retiring = _event()  # readable once no call is to wait any more
        try:
            self._socket, welcome, self._arena_fd = _join(path, name, timeout_s, requires)
        except BaseException:
            os.close(self._retiring)
            raise
        self._socket.setblocking(False)
        self._arena_size = (welcome.arena_bytes, welcome.huge_pages)
        self._mappings: dict[bool, _Mapping] = {}  # by whether it can be written to
        self._count_lock = threading.Lock()  # over what closes it: who holds the arena, and who calls
        self._held = 0  # readers and writers of the arena
        self._users = 0  # threads in a method
        self._change = threading.Condition()  # over the calls, and who reads
        self._calls: dict[int, _Call] = {}
        self._numbers = count(_UNASKED + 1)
        self._reader: object | None = None  # of the waiting callers the one that reads
        self._news = False
        self._error: OSError | ProtocolError | None = None  # of the stream, which is of no more use then
        self._send_lock = threading.Lock()
        self._outbox: deque[tuple[int, _Call]] = deque()
        self._readable = select.poll()  # the reader's
        self._readable.register(self._socket, select.POLLIN)
        self._readable.register(self._retiring, select.POLLIN)
        self._splitter = Splitter()
        self._incoming = memoryview(bytearray(_READ_BYTES))
        self.retired = False
        self.last_heard_s = time.monotonic()
        _links.add(self)

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The arena, to be read; mapped at its first use: tools that only ask for the status never do."""
        with self._count_lock:
            return self._mapped(writable=False)

    @property
    def silent_s(self) -> float:
        """Seconds since the node's last message, while it owes a late answer; 0 while it owes none."""
        if not self._calls:
            return 0.0
        with self._change:
            oldest_s = min((call.asked_s for call in self._calls.values() if call.late), default=None)
        return 0.0 if oldest_s is None else time.monotonic() - max(oldest_s, self.last_heard_s)

    @property
    def has_loose_ends(self) -> bool:
        """Whether there is something for `tend` to do."""
        with self._change:
            return bool(self._outbox) or any(call.late for call in self._calls.values())

    def call(self, request: m.Message, deadline_s: float, *, keep: bool = False) -> m.Answer:
        """One request and its answer. Raises DeadlineExceeded, after which the link is as good as before; ProtocolError for a request
        that cannot be sent; OSError and ProtocolError where the connection is of no more use (`is_broken`).

        keep: send the request even if that takes longer than its caller waits
        """
        operation, until = type(request).__name__.lower(), time.monotonic() + deadline_s
        number = next(self._numbers)
        call = _Call(memoryview(encode(request, number)), isinstance(request, _GRANTING), keep)
        self._enter()
        try:
            with self._change:
                self._calls[number] = call
            self._outbox.append((number, call))
            try:
                self._send(until)
                self._wait(lambda: call.answer is not None, until)
            except TimeoutError:
                pass  # it could not be sent in time
            with self._change:
                call.late = call.answer is None
            if call.answer is None:
                raise DeadlineExceeded(operation, deadline_s)
            return call.answer
        except BaseException:
            self._give_up(call)
            raise
        finally:
            self._leave()

    def pause(self, seconds: float) -> None:
        """Wait for that long, or until the node sends News. Of several callers that pause at once, one may get the News alone."""
        try:
            self._enter()
        except ConnectionError:
            return
        try:
            self._wait(self._take_news, time.monotonic() + seconds)
        except (OSError, ProtocolError):
            return  # the next call says so
        finally:
            self._leave()

    def tend(self, seconds: float) -> None:
        """Read late answers, and send queued requests. Raises OSError, ProtocolError."""
        until = time.monotonic() + seconds
        self._enter()
        try:
            with suppress(TimeoutError):
                while self.has_loose_ends and time.monotonic() < until:
                    self._send(until)  # what late answers granted, among others
                    self._wait(lambda: bool(self._outbox) or not any(call.late for call in self._calls.values()), until)
        finally:
            self._leave()

    @property
    def is_broken(self) -> bool:
        """Whether the connection has failed."""
        return self._error is not None

    def hold(self, *, writable: bool = False) -> npt.NDArray[np.uint8]:
        """One more reader, or writer, of the arena. Raises NodeError when it cannot be had."""
        with self._count_lock:
            buffer = self._mapped(writable)
            self._held += 1
            return buffer

    def let_go(self) -> None:
        """One less."""
        with self._count_lock:
            self._held -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """No more calls, and an end to those that wait; close as soon as nobody holds anything.

        The socket stays open, in both directions, while somebody holds the arena: a node that cannot write to it takes the memory back.
        """
        with self._count_lock:
            self.retired = True
            if self._retiring >= 0:
                os.eventfd_write(self._retiring, 1)
            self._close_if_unused()

    def forget_in_child(self) -> None:
        """In a forked child: close its copy of the socket, or what the parent holds would be held for as long as the child lives.

        The parent's locks may be taken here by threads that the child does not have, so the child gets new ones.
        """
        self._count_lock, self._send_lock = threading.Lock(), threading.Lock()
        self._change = threading.Condition()
        self._users = 0
        self.retired = True
        self._error = ConnectionError("this process was forked from the one that joined the node")
        self._close_sockets()

    def _enter(self) -> None:
        with self._count_lock:
            if self.retired:
                raise ConnectionError("the connection is closed")
            self._users += 1

    def _leave(self) -> None:
        with self._count_lock:
            self._users -= 1
            self._close_if_unused()

    def _mapped(self, writable: bool) -> npt.NDArray[np.uint8]:
        """Two mappings: readers have one that cannot be written to, and a process that stores nothing has no other."""
        if self.retired:
            raise NodeError("the connection to the node is closed")
        mapping = self._mappings.get(writable)
        if mapping is None:
            nbytes, huge = self._arena_size
            try:
                fd = os.dup(self._arena_fd)  # `attach` takes it over, even where it fails
            except OSError as error:
                raise NodeError(f"the node's arena could not be mapped: {error}") from None
            mapping = self._mappings[writable] = _Mapping(Arena.attach(fd, nbytes, huge, writable=writable))
        assert mapping.buffer is not None
        return mapping.buffer

    def _close_if_unused(self) -> None:
        if not self.retired or self._held or self._users:  # the last of them closes
            return
        self._close_sockets()
        while self._mappings:
            self._mappings.popitem()[1].close()
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
            self._arena_fd = -1

    def _close_sockets(self) -> None:
        self._socket.close()
        if self._retiring >= 0:
            os.close(self._retiring)
            self._retiring = -1

    # Sending: the thread that has the lock sends all queued requests, in order.

    def _send(self, until: float) -> None:
        """Send the queued requests. Raises TimeoutError, OSError."""
        if not self._send_lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError
        try:
            while self._outbox:
                number, call = self._outbox[0]
                if call.late and not call.begun and not call.keep:
                    with self._change:
                        self._calls.pop(number, None)  # the node never hears of it
                else:
                    self._send_one(call, until)
                self._outbox.popleft()
        finally:
            self._send_lock.release()

    def _send_one(self, call: _Call, until: float) -> None:
        """All of a request, or as much as the node takes in time: another call sends the rest."""
        while call.data:
            self._check()
            call.begun = True
            try:
                call.data = call.data[self._socket.send(call.data) :]
            except BlockingIOError:
                self._wait_until_writable(until)
            except OSError as error:
                self._error = _again(error)
                raise

    # Receiving: one of the waiting callers reads for all.

    def _wait(self, is_done: Callable[[], bool], until: float) -> bool:
        """Wait until `is_done()`, which is called under the lock. Returns False at the deadline. Raises the connection's error."""
        me = object()
        while True:
            try:
                with self._change:
                    while self._reader is not me:
                        self._check()
                        if is_done():
                            return True
                        left = until - time.monotonic()
                        if left <= 0:
                            return False
                        if self._reader is None:
                            self._reader = me
                        else:
                            self._change.wait(left)
                try:
                    self._read(until)
                except TimeoutError:
                    return False
            finally:  # wherever an interrupt comes: one step makes it the reader, and one ends that
                if self._reader is me:
                    self._reader = None
                    with self._change:
                        self._change.notify_all()

    def _read(self, until: float) -> None:
        """Read the next bytes, and match answers to calls. Raises TimeoutError, OSError, ProtocolError."""
        if not self._readable.poll(max(0.0, until - time.monotonic()) * 1e3):
            raise TimeoutError
        if self.retired:
            return  # nobody is to wait any more: see `_check`
        whole = False
        try:
            nbytes = self._socket.recv_into(self._incoming)
            if not nbytes:
                raise ConnectionError("the node closed the connection")
            self.last_heard_s = time.monotonic()
            for body in self._splitter.feed(self._incoming[:nbytes]):
                number, record = split_number(body)
                self._deliver(number, _answer_decoder.decode(record))
            whole = True
        except BlockingIOError:
            whole = True  # there is nothing after all
        except (OSError, ProtocolError) as error:
            self._error = _again(error)
            raise
        finally:
            if not whole and self._error is None:
                self._error = ConnectionError("a call was cut short while it read an answer")

    def _deliver(self, number: int, answer: m.Answer) -> None:
        if number == _UNASKED and isinstance(answer, m.Refused):
            raise ConnectionError(f"the node refused: {answer.reason}")
        if number == _UNASKED and isinstance(answer, m.News):
            self._news = True
            return
        with self._change:
            call = self._calls.pop(number, None)
            if call is None:
                raise ProtocolError("the node said more than it was asked")
            call.answer = answer
            late = call.late
        if late and call.grants:
            self._give_back(answer)

    def _give_up(self, call: _Call) -> None:
        """Its caller takes no answer any more, even if one has arrived."""
        with self._change:
            already = call.late
            call.late = True
        if call.answer is not None and not already and call.grants:
            self._give_back(call.answer)

    def _give_back(self, answer: m.Answer) -> None:
        """Queue the return of a late answer's grant."""
        if (unwanted := _to_give_back(answer)) is not None:
            number = next(self._numbers)
            call = _Call(memoryview(encode(unwanted, number)), keep=True, late=True)
            with self._change:
                self._calls[number] = call
            self._outbox.append((number, call))

    def _take_news(self) -> bool:
        news, self._news = self._news, False
        return news

    def _wait_until_writable(self, until: float) -> None:
        """Raises TimeoutError."""
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        writable.register(self._retiring, select.POLLIN)
        if not writable.poll(max(0.0, until - time.monotonic()) * 1e3):
            raise TimeoutError

    def _check(self) -> None:
        if self._error is not None:
            raise _again(self._error)
        if self.retired:
            raise ConnectionError("the connection is closed")


def _to_give_back(answer: m.Answer) -> m.Message | None:
    """The request that returns this answer's grant; None if it granted nothing."""
    match answer:
        case m.Found() if answer.ticket:
            return m.Release(answer.ticket)
        case m.Lent():
            return m.Release(answer.loan)
        case m.Granted() if answer.room:
            return m.Abandon(answer.room)
        case m.Recoding():
            return m.Release(answer.number)
        case _:
            return None


def _event() -> int:
    """Raises NodeError."""
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise NodeError(f"cannot join a node: {error}") from None


def _again(error: OSError | ProtocolError) -> OSError | ProtocolError:
    """The same error without its traceback, whose frames would keep the arena mapped."""
    return type(error)(*error.args)


_links: "WeakSet[Link]" = WeakSet()  # of this process


def _forget_links() -> None:
    for link in list(_links):
        link.forget_in_child()


os.register_at_fork(after_in_child=_forget_links)


def _join(path: Path, name: str, timeout_s: float, requires: bytes) -> tuple[socket.socket, m.Welcome, int]:
    """Connect and greet. Returns the socket, the node's welcome, and the arena's descriptor. Raises NodeError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        if (uid := peer_user(sock)) != os.getuid():
            raise NodeError(f"the node on {path} belongs to user {uid}; you are user {os.getuid()}: run your own, on a socket of your own")
        hello = encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, name[:_MOST_NAME], os.getpid(), requires))
        if len(hello) > LENGTH_BYTES + m.MAX_HELLO_BYTES:
            raise NodeError(f"the settings name more tiers than a node can be told of: {len(hello)} bytes of {m.MAX_HELLO_BYTES}")
        with suppress(BrokenPipeError):  # the node has refused already, and says why
            sock.sendall(hello)
        data, fds = _receive_with_descriptors(sock)
        while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + body_length(data, m.MAX_HELLO_BYTES):
            more = sock.recv(65536)
            if not more:
                raise ConnectionError("the connection was closed")
            data += more
        greeting = _greeting_decoder.decode(data[LENGTH_BYTES:])
        if isinstance(greeting, m.Refused):
            raise NodeRefused(f"the node on {path} refused: {greeting.reason}")
        if greeting.version != m.PROTOCOL_VERSION:
            raise NodeError(
                f"the node on {path} (kvhold {greeting.node}) speaks protocol {greeting.version}, this client {m.PROTOCOL_VERSION}; "
                f"install the same kvhold on both sides, then restart the node (kvhold stop)"
            )
        if len(fds) != _DESCRIPTORS:
            raise ProtocolError("the node sent no arena")
        if greeting.different:
            log.warning("the node on %s has other settings than this process: %s (node.on_mismatch)", path, greeting.different)
        (arena,) = fds
        fds = []
        return sock, greeting, arena
    except (OSError, ProtocolError) as error:
        sock.close()
        raise NodeError(f"cannot join a node on {path}: {error}") from None
    except NodeError:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _receive_with_descriptors(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Bytes, and the descriptors that came with them. `socket.recv_fds` would pass them on to every child, which keeps the arena alive."""
    fds = array("i")
    data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_LEN(_DESCRIPTORS * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
