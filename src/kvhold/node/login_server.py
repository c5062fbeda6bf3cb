"""A TCP server with a login, for central caches and a node's peers.

Beyond loopback a client needs the token, or a certificate; before its login it is limited
(`logins.py`). One event loop.
"""

import asyncio
import hmac
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from kvhold.core.cleanup import on_error
from kvhold.core.config import LoginConfig
from kvhold.core.errors import ConfigError, KVHoldError, NodeError, ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.core.secrets import read_secret
from kvhold.core.turns import next_turn
from kvhold.net import login
from kvhold.net.addresses import is_loopback, network_of
from kvhold.net.stream import Stream, accept_stream
from kvhold.net.tls import server_context
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.logins import Logins, StrangersLog

log = logging.getLogger(__name__)

_GREET_WITHIN_S = 5.0
_ACCEPT_PAUSE_S = 0.05
_TOKEN_NEEDED, _TOKEN_WRONG = "a token is needed", "the token is wrong"
_hello: Decoder[login.LoginHello] = Decoder(login.LoginHello)


@dataclass(frozen=True)
class ServedProtocol:
    """most_apart: of versions; the lower is spoken"""

    magic: str
    version: int
    what: str
    default_port: int
    most_apart: int = 0

    @property
    def no_hello(self) -> str:
        return (
            f"{self._here}; the first message must be its Hello, of at most "
            f"{login.MAX_HELLO_BYTES} bytes"
        )

    def why_not_spoken(self, version: int) -> str:
        """Empty: it is."""
        if abs(version - self.version) <= self.most_apart:
            return ""
        if version < self.version:
            return f"{self._here}; the client speaks another version, an older one: upgrade it"
        return f"{self._here}; the client speaks another version, a newer one: upgrade this side"

    @property
    def _here(self) -> str:
        return f"this is a {self.what}, protocol {self.version}"


class _Stranger(Exception):
    """The reason is a constant text, never the client's."""

    def __init__(
        self, reason: str, *, denied: bool = False, is_other_version: bool = False
    ) -> None:
        super().__init__(reason)
        self.denied = denied
        self.is_other_version = is_other_version


class LoginServer(ABC):
    metrics: Metrics
    address_setting = "address"

    def __init__(
        self, config: LoginConfig, section: str, address: str, protocol: ServedProtocol
    ) -> None:
        """Raises ConfigError: an address that may not be exposed, or unusable credentials."""
        self._login = config
        self._section = section
        self._protocol = protocol
        self.host, self.port = self._split(address)
        self._token = self._read_token()
        self._token_digest = _digest(self._token)
        self._tls = self._make_tls()
        if not is_loopback(self.host):
            self._check_exposed(address)
        self._conversations: set[asyncio.Task[None]] = set()
        self._logins: Logins[asyncio.Task[None]] = Logins()
        self._num_served = 0
        self._strangers = StrangersLog(log)

    @abstractmethod
    def _welcome(self, version: int) -> msgspec.Struct: ...

    @abstractmethod
    async def _converse_with(self, stream: Stream) -> None: ...

    def _note_refused(self, host: str, reason: str) -> None:  # noqa: B027 - only some need it
        ...

    async def _end(self, accepting: "asyncio.Task[None]") -> None:
        for task in (accepting, *self._conversations):
            task.cancel()
        await asyncio.wait((accepting, *self._conversations))

    def _check_exposed(self, address: str) -> None:
        """Raises ConfigError unless clients must authenticate, over TLS or with `insecure`."""
        config, section = self._login, self._section
        if not self._token and not config.tls_client_ca:
            raise ConfigError(
                f"{section}.{self.address_setting} = {address!r}: only the loopback interface is "
                "served without authentication; "
                f"set {section}.token_file (or {section}.token), or {section}.tls_cert and "
                f"{section}.tls_client_ca"
            )
        if not self._tls and not config.insecure:
            raise ConfigError(
                f"{section}.{self.address_setting} = {address!r}: the token and all KV would cross "
                "the network in clear text; "
                f"set {section}.tls_cert, or {section}.insecure=true if nobody else can read that "
                "traffic"
            )

    def _listen(self) -> socket.socket:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.socket(family, kind, protocol)
            with on_error(listener.close):
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
                listener.listen(1024)
        except OSError as error:
            raise NodeError(
                f"{self._section}.{self.address_setting}: cannot listen on "
                f"{self.host}:{self.port}: {error.strerror or error}"
            ) from None
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        return listener

    async def _connection(self, listener: socket.socket) -> tuple[socket.socket, Any]:
        """Raises OSError. `loop.sock_accept` loses a connection that comes as it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, where = listener.accept()
            except (BlockingIOError, InterruptedError):
                come: asyncio.Future[None] = loop.create_future()
                loop.add_reader(listener, _wake, come)
                try:
                    await come
                finally:
                    loop.remove_reader(listener)
            else:
                sock.setblocking(False)
                return sock, where

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, where = await self._connection(listener)
            except OSError as error:
                self._strangers.refused(
                    "the network", f"it could not be accepted: {error.strerror or error}"
                )
                # no event says that a descriptor is free
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = loop.create_task(self._converse(sock, where[0]))
            self._conversations.add(task)
            task.add_done_callback(lambda task, sock=sock: self._ended(task, sock))  # type: ignore[misc]
            if (crowded_out := self._logins.add(task, network_of(where[0]))) is not None:
                self.metrics.add("kvhold_connections", result="refused")
                self.metrics.add("kvhold_protocol_errors", reason="crowded out")
                crowded_out.cancel()
            # an accept that need not wait lets no task run
            await next_turn()

    def _ended(self, task: "asyncio.Task[None]", sock: socket.socket) -> None:
        self._conversations.discard(task)
        self._logins.remove(task)
        sock.close()

    async def _converse(self, sock: socket.socket, host: str) -> None:
        stream = None
        try:
            async with asyncio.timeout(_GREET_WITHIN_S):
                stream = await accept_stream(
                    sock, self._tls, allowed_bytes=LENGTH_BYTES + login.MAX_HELLO_BYTES
                )
                version = await self._log_in(stream)
            task = asyncio.current_task()
            assert task is not None
            self._logins.remove(task)
            stream.allowed_bytes = None
            await self._serve(stream, version)
        except _Stranger as error:
            self._strangers.refused(host, str(error))
            self._note_refused(host, str(error))
            await self._refuse(
                stream,
                str(error),
                denied=error.denied,
                is_other_version=error.is_other_version,
            )
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("a client left: %s", type(error).__name__)
        except (ProtocolError, ValueError) as error:
            log.warning("refused a client from %s: %s", host, error)
            self._note_refused(host, str(error))
            await self._refuse(stream, str(error))
        except Exception:
            log.exception("a conversation failed")
            self.metrics.add("kvhold_protocol_errors", reason="internal error")
        finally:
            if stream is not None:
                stream.close()

    async def _log_in(self, stream: Stream) -> int:
        try:
            prefix = await stream.read(LENGTH_BYTES)
            hello = _hello.decode(await stream.read(body_length(prefix, login.MAX_HELLO_BYTES)))
        except ProtocolError:
            raise _Stranger(self._protocol.no_hello) from None
        if hello.magic != self._protocol.magic:
            raise _Stranger(self._protocol.no_hello)
        if reason := self._protocol.why_not_spoken(hello.version):
            raise _Stranger(reason, is_other_version=True)
        if self._token and not hmac.compare_digest(_digest(hello.token), self._token_digest):
            raise _Stranger(_TOKEN_WRONG if hello.token else _TOKEN_NEEDED, denied=True)
        return min(hello.version, self._protocol.version)

    async def _serve(self, stream: Stream, version: int) -> None:
        most = self._login.max_connections
        if self._num_served >= most:
            reason = f"{self._section}.max_connections = {most} are in use"
            log.warning("refused a client: %s", reason)
            self._note_refused(stream.host, reason)
            await self._refuse(stream, f"{reason}; try again later")
            return
        self._num_served += 1
        try:
            self.metrics.add("kvhold_connections", result="accepted")
            await stream.send([encode(self._welcome(version))])
            await self._converse_with(stream)
        finally:
            self._num_served -= 1

    async def _refuse(
        self,
        stream: Stream | None,
        reason: str,
        *,
        denied: bool = False,
        is_other_version: bool = False,
    ) -> None:
        self.metrics.add("kvhold_protocol_errors", reason="denied" if denied else "bad message")
        self.metrics.add("kvhold_connections", result="refused")
        if stream is not None and not stream.closed:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_GREET_WITHIN_S):
                    await stream.send(
                        [encode(login.LoginRefused(reason, denied, is_other_version))]
                    )

    def _split(self, text: str) -> tuple[str, int]:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"{self._section}.{self.address_setting} = {text!r}: write HOST:PORT, such as "
                f"127.0.0.1:{self._protocol.default_port}"
            )
        return host.strip("[]"), int(port)

    def _read_token(self) -> str:
        config = self._login
        token = (
            read_secret(config.token_file, where=f"{self._section}.token_file")
            if config.token_file
            else config.token
        )
        if len(token.encode()) > login.MAX_TOKEN_BYTES:
            raise ConfigError(
                f"{self._section}.token: the token must have at most {login.MAX_TOKEN_BYTES} bytes"
            )
        return token

    def _make_tls(self) -> ssl.SSLContext | None:
        config, section = self._login, self._section
        if not config.tls_cert:
            if config.tls_key or config.tls_client_ca:
                raise ConfigError(
                    f"{section}.tls_key and {section}.tls_client_ca need {section}.tls_cert"
                )
            return None
        try:
            return server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
        except KVHoldError as error:
            raise ConfigError(f"{section}.tls_{error}") from None


def _wake(come: "asyncio.Future[None]") -> None:
    if not come.done():
        come.set_result(None)


def _digest(token: str) -> bytes:
    """Comparing digests hides the token's length."""
    return blake2b(token.encode()).digest()
