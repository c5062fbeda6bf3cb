"""The node's Unix socket, with a spare descriptor to send refusals."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from kvhold.net import messages as m
from kvhold.net.wire import encode

log = logging.getLogger(__name__)

_BACKLOG = 1024
_AT_ONCE = 16
_PAUSE_S = 0.5  # while the host has no descriptor left
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        refusal: Callable[[], str | None],
    ) -> None:
        """refusal: why no client can be served, or None"""
        self._socket = sock
        self._make_protocol = make_protocol
        self._refusal = refusal
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._joining: set[asyncio.Task[object]] = set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop = None
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                self._refuse_with_spare(no_descriptor(error))
                return
            if (why := self._refusal()) is not None:
                _refuse(connection, why)
            else:
                self._join(connection)

    def _join(self, connection: socket.socket) -> None:
        assert self._loop is not None
        connection.setblocking(False)
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(self._make_protocol, connection)
        )
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _refuse_with_spare(self, why: str) -> None:
        assert self._loop is not None
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        try:
            connection, _ = self._socket.accept()
            _refuse(connection, why)
        except OSError as error:
            log.warning("clients wait to be accepted: %s", error)
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_PAUSE_S, self._go_on)
        finally:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _go_on(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._socket, self._accept)


def no_descriptor(error: OSError) -> str:
    return f"the node has no descriptor left ({error.strerror}); raise `ulimit -n` and restart it"


def _refuse(connection: socket.socket, why: str) -> None:
    log.warning("refused a client: %s", why)
    with connection, suppress(OSError):
        connection.setblocking(False)
        connection.send(encode(m.Refused(why, fatal=True)))
