import asyncio
import logging
import os
import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kvhold import __version__
from kvhold.cache.chores import Running
from kvhold.core.errors import NodeError, ProtocolError
from kvhold.net import messages as m
from kvhold.net.wire import Decoder, Splitter, encode, split_number
from kvhold.node.listener import EXHAUSTED, no_descriptor
from kvhold.node.peers import ProcessEnd, SocketPeer
from kvhold.node.requirements import check, unpack
from kvhold.node.session import Session

if TYPE_CHECKING:
    from kvhold.node.server import Node

log = logging.getLogger(__name__)

_HELLO_WITHIN_S = 5.0
_MOST_SAID = 900
_MAX_UNREAD_BYTES = 16 << 20
_UNASKED = 0
_hello_decoder: Decoder[m.Hello] = Decoder(m.Hello)
_request_decoder: Decoder[m.Request] = Decoder(m.Request)


class ClientConnection(asyncio.BufferedProtocol):
    """In the node's loop.

    A client that breaks the rules is disconnected, or, if it may still be writing, ignored until it
    closes its end.
    """

    def __init__(self, node: "Node") -> None:
        self._node = node
        self.number = next(node.numbers)
        self._peer: SocketPeer | None = None
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
        self._join(transport, SocketPeer.of(transport.get_extra_info("socket")))

    def _join(self, transport: asyncio.Transport, peer: SocketPeer) -> None:
        self._transport, self._peer = transport, peer
        self._node.joined(self)
        if self._node.is_ending:
            transport.close()
        elif self._peer.uid != os.getuid():
            self._refuse(
                f"this node serves only user {os.getuid()}; you are user {self._peer.uid}",
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
        began, was_busy = self._node.now(), self._is_busy()
        try:
            answered = False
            for body in self._splitter.feed(self._node.incoming[:nbytes]):
                if self._is_over():
                    return
                if self.session is None:
                    self._greet(_hello_decoder.decode(body))
                elif answered or self._is_busy():
                    self._waiting.append(bytes(body))
                else:
                    answered = True
                    self._answer(body)
        except ProtocolError as error:
            self._refuse(str(error), "bad message")
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
        elif self._answering.is_done:
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
                "until the process ends",
                *self._who,
            )
            self._process_end.then(self._leave)
        else:
            self._leave()

    def depart(self) -> None:
        self._has_departed = True
        if self._is_closed:
            self._leave()

    def _leave(self) -> None:
        try:
            if self.session is not None and not self._node.is_ending:
                self.session.release_all()
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
        """Others may write its reserved chunks."""
        if self.session is not None:
            self._node.state.give_up(self.session)
        self._refuse("this client was ended by `kvhold kick`", "kicked")

    def drop_if_dead(self) -> None:
        """A dead process's child may keep the connection open. Does nothing while a device
        copies.
        """
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
                "the process of %s (pid %d) has ended, but a child keeps its socket open",
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
                    publishes=self._node.router_publisher is not None,
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
        """Raises OSError: no descriptor."""
        assert self._transport is not None
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
            # `close` would wait for the client
            self._transport.abort()
        else:
            self._transport.close()
