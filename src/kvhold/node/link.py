"""One connection to the node, and its arena. Any thread.

One waiting caller reads for all; without one, the client's keeper calls `tend`. A broken or retired
link closes only when no thread uses the arena: the node takes memory back then.
"""

import errno
import logging
import os
import select
import socket
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvhold.core.cleanup import on_error
from kvhold.core.errors import DeadlineExceeded, NodeError, NodeRefused, ProtocolError
from kvhold.memory.arena import Arena, Toucher
from kvhold.net import messages as m
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.conversation import Call, Conversation, again
from kvhold.node.membership import Lifetime
from kvhold.node.notifier import Notifier
from kvhold.node.paths import peer_user

log = logging.getLogger(__name__)

_DESCRIPTORS = 1
_READ_BYTES = 64 << 10
# per mapping: 8 MiB of page tables
_TOUCHED_BYTES = 4 << 30
_TOUCH_AFTER_S = 1.0
_LAST_WORDS_S = 1.0
_MOST_NAME = 100

_greeting_decoder: Decoder[m.Welcome | m.Refused] = Decoder(m.Welcome | m.Refused)


class _Mapping:
    """Only the first pages are faulted in."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._toucher = Toucher(
            [region.first(_TOUCHED_BYTES) for region in arena.regions], after_s=_TOUCH_AFTER_S
        ).start()
        self.buffer: npt.NDArray[np.uint8] | None = np.frombuffer(arena.buffer, dtype=np.uint8)

    def close(self) -> None:
        self._toucher.stop()
        self.buffer = None
        self._arena.close()


class Link:
    def __init__(self, path: Path, name: str, timeout_s: float, requires: bytes = b"") -> None:
        """Raises NodeError; NodeRefused."""
        self._retiring = _event()
        with on_error(lambda: os.close(self._retiring)):
            self._socket, welcome, self._arena_fd = _join(path, name, timeout_s, requires)
        self._socket.setblocking(False)
        self.welcome = welcome
        self.uses_device = False
        """Whether a device copies between the arena and this process."""
        self._arena_size = (welcome.arena_bytes, welcome.huge_pages)
        self._mappings: dict[bool, _Mapping] = {}
        self._count_lock = threading.Lock()
        self._lifetime = Lifetime()
        self._lock = threading.Lock()
        self._conversation = Conversation(time.monotonic())
        self._change = threading.Condition(self._lock)
        self._num_waiting = 0
        self._reader: object | None = None
        self._send_lock = threading.Lock()
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._readable.register(self._retiring, select.POLLIN)
        self._incoming = memoryview(bytearray(_READ_BYTES))
        _links.add(self)

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        with self._count_lock:
            return self._mapped(writable=False)

    def mappings(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """A read-only and a writable view. Raises NodeError."""
        with self._count_lock:
            return self._mapped(writable=False), self._mapped(writable=True)

    @property
    def silent_s(self) -> float:
        if not self._conversation.is_owed:
            return 0.0
        with self._lock:
            return self._conversation.silent_s(time.monotonic())

    @property
    def last_heard_s(self) -> float:
        return self._conversation.last_heard_s

    @property
    def has_loose_ends(self) -> bool:
        return self._conversation.has_loose_ends

    @property
    def is_broken(self) -> bool:
        return self._conversation.error is not None

    @property
    def retired(self) -> bool:
        return self._lifetime.retired

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def call(self, request: m.Message, deadline_s: float, *, keep: bool = False) -> m.Answer:
        """keep: send it even after the deadline

        Raises DeadlineExceeded: the link stays usable; ProtocolError: an unsendable request;
        OSError or ProtocolError: the connection has failed (`is_broken`).
        """
        asked_s = time.monotonic()
        until = asked_s + deadline_s
        call = self._conversation.prepare(request, keep=keep)
        self._enter()
        try:
            with self._lock:
                self._conversation.begin(call, asked_s)
            try:
                self._send(until)
                self._wait(lambda: call.answer is not None, until)
            except TimeoutError:
                pass
            if (answer := self._answer_of(call)) is None:
                raise DeadlineExceeded(request.operation, deadline_s)
            return answer
        except BaseException:
            with self._lock:
                self._conversation.give_up(call)
            raise
        finally:
            self._leave()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until News. Of several callers, only one may get it."""
        try:
            self._enter()
        except ConnectionError:
            return
        try:
            self._wait(self._conversation.take_news, time.monotonic() + seconds)
        except (OSError, ProtocolError):
            return
        finally:
            self._leave()

    def watch(self, notifier: Notifier, seconds: float) -> None:
        self._enter()
        try:
            end = select.poll()
            end.register(self._socket, select.POLLRDHUP)
            end.register(self._retiring, select.POLLIN)
            end.register(notifier, select.POLLIN)
            if any(fd == self._socket.fileno() for fd, _ in end.poll(seconds * 1e3)):
                self._wait(lambda: False, time.monotonic() + _LAST_WORDS_S)
        finally:
            self._leave()

    def tend(self, seconds: float) -> None:
        """Read late answers, send queued requests. Raises OSError, ProtocolError."""
        until, talk = time.monotonic() + seconds, self._conversation
        self._enter()
        try:
            with suppress(TimeoutError):
                while talk.has_loose_ends and time.monotonic() < until:
                    self._send(until)
                    self._wait(lambda: talk.is_unsent or not talk.is_owed, until)
        finally:
            self._leave()

    def hold(self, *, writable: bool = False) -> npt.NDArray[np.uint8]:
        """Until `let_go`. Raises NodeError."""
        with self._count_lock:
            buffer = self._mapped(writable)
            self._lifetime.hold()
            return buffer

    def let_go(self) -> None:
        with self._count_lock:
            self._lifetime.let_go()
            self._close_if_unused()

    def retire(self, *, at_once: bool = True) -> None:
        """Accept no more calls. The link closes when the arena is not held.

        at_once: False closes in a thread: freeing a dead node's 512 MiB takes 0.2 s
        """
        with self._count_lock:
            self._lifetime.retired = True
            if self._retiring >= 0:
                os.eventfd_write(self._retiring, 1)
            if at_once:
                self._close_if_unused()
        if not at_once:
            try:
                threading.Thread(target=self.retire, name="kvhold-unmap", daemon=True).start()
            except RuntimeError:
                self.retire()

    def forget_in_child(self) -> None:
        """The socket's copy would keep the parent's holdings alive."""
        self._count_lock, self._send_lock, self._lock = (
            threading.Lock(),
            threading.Lock(),
            threading.Lock(),
        )
        self._change = threading.Condition(self._lock)
        self._lifetime.forget_callers()
        self._conversation.fail(
            ConnectionError("this process was forked from the one that joined the node")
        )
        self._close_sockets()

    def _enter(self) -> None:
        with self._count_lock:
            self._lifetime.enter()

    def _leave(self) -> None:
        with self._count_lock:
            self._lifetime.leave()
            self._close_if_unused()

    def _mapped(self, writable: bool) -> npt.NDArray[np.uint8]:
        if self.retired:
            raise NodeError("the connection to the node is closed")
        mapping = self._mappings.get(writable)
        if mapping is None:
            nbytes, huge = self._arena_size
            try:
                fd = os.dup(self._arena_fd)
            except OSError as error:
                raise NodeError(f"the node's arena could not be mapped: {error}") from None
            mapping = self._mappings[writable] = _Mapping(
                Arena.attach(fd, nbytes, huge, writable=writable)
            )
        assert mapping.buffer is not None
        return mapping.buffer

    def _close_if_unused(self) -> None:
        if not self._lifetime.is_over:
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

    def _answer_of(self, call: Call) -> m.Answer | None:
        if call.answer is None:
            with self._lock:
                if call.answer is None:
                    self._conversation.give_up(call)
        return call.answer if not call.late else None

    def _send(self, until: float) -> None:
        if not self._send_lock.acquire(blocking=False) and not self._send_lock.acquire(
            timeout=max(0.0, until - time.monotonic())
        ):
            raise TimeoutError
        try:
            with self._lock:
                data = self._conversation.to_send()
            while data is not None:
                self._check()
                data = self._send_some(data, until)
        finally:
            self._send_lock.release()

    def _send_some(self, data: memoryview, until: float) -> memoryview | None:
        try:
            nbytes = self._socket.send(data)
            with self._lock:
                return self._conversation.sent(nbytes)
        except BlockingIOError:
            self._wait_until_writable(until)
            with self._lock:
                return self._conversation.to_send()
        # the sent part is unknown
        except BaseException as error:
            self._fail(error, "a call was cut short while it sent a request")
            raise

    def _wait(self, is_done: Callable[[], bool], until: float) -> bool:
        me = object()
        while True:
            try:
                with self._lock:
                    while self._reader is not me:
                        if is_done():
                            return True
                        self._check()
                        left = until - time.monotonic()
                        if left <= 0:
                            return False
                        if self._reader is None:
                            self._reader = me
                        else:
                            self._num_waiting += 1
                            self._change.wait(left)
                            self._num_waiting -= 1
                try:
                    self._read(until)
                except TimeoutError:
                    return False
            # an interrupt may come anywhere, so one assignment changes the reader
            finally:
                if self._reader is me:
                    self._reader = None
                    with self._lock:
                        if self._num_waiting:
                            self._change.notify_all()

    def _read(self, until: float) -> None:
        if not self._readable.poll(max(0.0, until - time.monotonic()) * 1e3):
            raise TimeoutError
        if self.retired:
            return
        try:
            nbytes = self._socket.recv_into(self._incoming)
            if not nbytes:
                raise ConnectionError("the node closed the connection")
            for number, answer in self._conversation.read(
                self._incoming[:nbytes], time.monotonic()
            ):
                with self._lock:
                    self._conversation.deliver(number, answer)
        except BlockingIOError:
            return
        # the read part is unknown
        except BaseException as error:
            self._fail(error, "a call was cut short while it read an answer")
            raise

    def _wait_until_writable(self, until: float) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        writable.register(self._retiring, select.POLLIN)
        if not writable.poll(max(0.0, until - time.monotonic()) * 1e3):
            raise TimeoutError

    def _fail(self, error: BaseException, cut_short: str) -> None:
        self._conversation.fail(
            error if isinstance(error, OSError | ProtocolError) else ConnectionError(cut_short)
        )

    def _check(self) -> None:
        if (error := self._conversation.error) is not None:
            raise again(error)
        if self.retired:
            raise ConnectionError("the connection is closed")


def _event() -> int:
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise NodeError(f"cannot join a node: {error}") from None


_links: "WeakSet[Link]" = WeakSet()


def _forget_links() -> None:
    for link in list(_links):
        link.forget_in_child()


os.register_at_fork(after_in_child=_forget_links)


def _join(
    path: Path, name: str, timeout_s: float, requires: bytes
) -> tuple[socket.socket, m.Welcome, int]:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise NodeError(f"cannot join a node on {path}: {error}") from None
    fds: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        if (uid := peer_user(sock)) != os.getuid():
            raise NodeError(
                f"the node on {path} belongs to user {uid}; you are user {os.getuid()}: "
                "run your own node, with another node.socket"
            )
        hello = encode(
            m.Hello(m.MAGIC, m.PROTOCOL_VERSION, name[:_MOST_NAME], os.getpid(), requires)
        )
        if len(hello) > LENGTH_BYTES + m.MAX_HELLO_BYTES:
            raise NodeError(
                f"the settings name too many tiers to join a node: {len(hello)} bytes, at most "
                f"{m.MAX_HELLO_BYTES}"
            )
        with suppress(BrokenPipeError):
            sock.sendall(hello)
        data, fds = _receive_with_descriptors(sock)
        while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + body_length(
            data, m.MAX_HELLO_BYTES
        ):
            more = sock.recv(65536)
            if not more:
                raise ConnectionError("the connection was closed")
            data += more
        greeting = _greeting_decoder.decode(data[LENGTH_BYTES:])
        if isinstance(greeting, m.Refused):
            raise NodeRefused(f"the node on {path} refused: {greeting.reason}")
        if greeting.version != m.PROTOCOL_VERSION:
            raise NodeError(
                f"the node on {path} (kvhold {greeting.node}) speaks protocol "
                f"{greeting.version}, this client {m.PROTOCOL_VERSION}; "
                f"install the same kvhold on both sides, then restart the node (kvhold stop)"
            )
        if len(fds) != _DESCRIPTORS:
            raise ProtocolError("the node sent no arena")
        if greeting.different:
            log.warning(
                "the node on %s has other settings than this process: %s (node.on_mismatch)",
                path,
                greeting.different,
            )
        (arena,) = fds
        fds = []
        return sock, greeting, arena
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise NodeError(
            f"no node runs on {path}. The first engine that uses kvhold starts one, and so does "
            "`kvhold serve --detach`"
        ) from None
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
    """Raises OSError, also without a free descriptor. Unlike `socket.recv_fds`, children do not
    inherit the descriptors.
    """
    fds = array("i")
    data, ancillary, flags, _ = sock.recvmsg(
        65536, socket.CMSG_LEN(_DESCRIPTORS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if flags & socket.MSG_CTRUNC and not fds:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return data, list(fds)
