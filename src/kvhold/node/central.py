"""The central cache of many hosts: `kvhold serve --listen HOST:PORT`.

One event loop; values are not copied.

Beyond the loopback interface a client needs the token, or a certificate of the configured
authorities. Sizes are checked before memory is reserved.

A stranger (a client before its login) costs little: its bytes, time and connections (`logins.py`)
are limited, and its text is neither logged nor sent back.
"""

import asyncio
import hmac
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from math import inf

from kvhold.core.cleanup import on_error
from kvhold.core.config import Config, ListenConfig
from kvhold.core.errors import ConfigError, KVHoldError, NodeError, ProtocolError
from kvhold.core.keys import KEY_BYTES
from kvhold.core.secrets import read_secret
from kvhold.core.store_options import MAX_TTL_S
from kvhold.core.turns import next_turn
from kvhold.net import central as c
from kvhold.net.addresses import is_loopback, network_of
from kvhold.net.stream import Stream, accept_stream
from kvhold.net.tls import server_context
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.central_store import CentralStore, NotReserved
from kvhold.node.logins import Logins, StrangersLog
from kvhold.tiers.ram import Entry

log = logging.getLogger(__name__)

_GREET_WITHIN_S = 5.0
_ACCEPT_PAUSE_S = 0.05
_PAGE_KEYS = 10_000
_TOKEN_NEEDED, _TOKEN_WRONG = "a token is needed", "the token is wrong"
_HERE = f"this is a kvhold central cache, protocol {c.CENTRAL_VERSION}"
_NO_HELLO = f"{_HERE}; the first message must be its Hello, of at most {c.MAX_HELLO_BYTES} bytes"
_OTHER_VERSION = f"{_HERE}; the client speaks another version"
_hello: Decoder[c.CentralHello] = Decoder(c.CentralHello)
_request: Decoder[c.Request] = Decoder(c.Request)


class _Stranger(Exception):
    """A client fails to log in. The reason is a constant text, never the client's."""

    def __init__(self, reason: str, *, denied: bool = False) -> None:
        super().__init__(reason)
        self.denied = denied


class Central:
    def __init__(self, config: Config, central_store: CentralStore | None = None) -> None:
        """central_store: `serve` closes it

        Raises ConfigError: an address that may not be exposed; CapacityError.
        """
        self._config = config.listen
        self.host, self.port = _address(config.listen.address)
        self._token = _token(config.listen)
        self._token_digest = _digest(self._token)
        self._tls = _tls(config.listen)
        if not is_loopback(self.host):
            self._check_exposed(config.listen)
        self.central_store = CentralStore(config) if central_store is None else central_store
        self._stopped = asyncio.Event()
        self._conversations: set[asyncio.Task[None]] = set()
        self._logins: Logins[asyncio.Task[None]] = Logins()
        self._num_served = 0
        self._strangers = StrangersLog(log)

    async def serve(self, on_ready: Callable[["Central"], None] | None = None) -> None:
        """Raises NodeError: cannot listen."""
        loop = asyncio.get_running_loop()
        listener = self._listen()
        accepting = loop.create_task(self._accept(listener))
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            await self.central_store.start()
            if on_ready is not None:
                on_ready(self)
            await self._stopped.wait()
        finally:
            for task in (accepting, *self._conversations):
                task.cancel()
            await asyncio.wait((accepting, *self._conversations))
            listener.close()
            await self.central_store.close()

    def stop(self) -> None:
        self._stopped.set()

    def _check_exposed(self, config: ListenConfig) -> None:
        """Raise ConfigError unless clients must authenticate, over TLS or with
        `listen.insecure`.
        """
        if not self._token and not config.tls_client_ca:
            raise ConfigError(
                f"listen.address = {config.address!r}: only the loopback interface is "
                "served without authentication; "
                "set listen.token_file (or listen.token), or listen.tls_cert and "
                "listen.tls_client_ca"
            )
        if not self._tls and not config.insecure:
            raise ConfigError(
                f"listen.address = {config.address!r}: the token and all KV would cross "
                "the network in clear text; "
                f"set listen.tls_cert, or listen.insecure=true if nobody else can read that traffic"
            )

    def _listen(self) -> socket.socket:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(1024)
        except OSError as error:
            raise NodeError(
                f"listen.address: cannot listen on {self.host}:{self.port}: "
                f"{error.strerror or error}"
            ) from None
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        return listener

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, where = await loop.sock_accept(listener)
            # out of descriptors, or the client has left
            except OSError as error:
                self._strangers.refused(
                    "the network", f"it could not be accepted: {error.strerror or error}"
                )
                # no event says that a descriptor is free; without a pause the loop would spin
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = loop.create_task(self._converse(sock, where[0]))
            self._conversations.add(task)
            task.add_done_callback(lambda task, sock=sock: self._ended(task, sock))  # type: ignore[misc]
            if (crowded_out := self._logins.add(task, network_of(where[0]))) is not None:
                self.central_store.metrics.add("kvhold_connections", result="refused")
                self.central_store.metrics.add("kvhold_protocol_errors", reason="crowded out")
                crowded_out.cancel()
            # an accept that need not wait lets no task run
            await next_turn()

    def _ended(self, task: "asyncio.Task[None]", sock: socket.socket) -> None:
        self._conversations.discard(task)
        self._logins.remove(task)
        sock.close()  # if cancelled before its first step

    async def _converse(self, sock: socket.socket, host: str) -> None:
        """Errors end this conversation only."""
        stream = None
        try:
            async with asyncio.timeout(_GREET_WITHIN_S):
                stream = await accept_stream(
                    sock, self._tls, allowed_bytes=LENGTH_BYTES + c.MAX_HELLO_BYTES
                )
                await self._log_in(stream)
            task = asyncio.current_task()
            assert task is not None
            self._logins.remove(task)
            stream.allowed_bytes = None
            await self._serve(stream)
        except _Stranger as error:
            self._strangers.refused(host, str(error))
            await self._refuse(stream, str(error), denied=error.denied)
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("a client left: %s", type(error).__name__)
        except (ProtocolError, ValueError) as error:
            log.warning("refused a client from %s: %s", host, error)
            await self._refuse(stream, str(error))
        # a task's edge: a bug ends one conversation, not the server
        except Exception:
            log.exception("a conversation failed")
            self.central_store.metrics.add("kvhold_protocol_errors", reason="internal error")
        finally:
            if stream is not None:
                stream.close()

    async def _log_in(self, stream: Stream) -> None:
        """Raises _Stranger unless the client may use this cache."""
        try:
            hello = _hello.decode(
                await stream.read(body_length(await stream.read(LENGTH_BYTES), c.MAX_HELLO_BYTES))
            )
        except ProtocolError:  # the error's text may quote the client
            raise _Stranger(_NO_HELLO) from None
        if hello.magic != c.CENTRAL_MAGIC:
            raise _Stranger(_NO_HELLO)
        if hello.version != c.CENTRAL_VERSION:
            raise _Stranger(_OTHER_VERSION)
        if self._token and not hmac.compare_digest(_digest(hello.token), self._token_digest):
            raise _Stranger(_TOKEN_WRONG if hello.token else _TOKEN_NEEDED, denied=True)

    async def _serve(self, stream: Stream) -> None:
        if self._num_served >= self._config.max_connections:
            log.warning(
                "refused a client: listen.max_connections = %d are in use",
                self._config.max_connections,
            )
            await self._refuse(
                stream,
                f"listen.max_connections = {self._config.max_connections} are in use; try "
                "again later",
            )
            return
        self._num_served += 1
        try:
            self.central_store.metrics.add("kvhold_connections", result="accepted")
            await stream.send(
                [encode(c.CentralWelcome(c.CENTRAL_VERSION, self._config.max_value_bytes))]
            )
            while True:
                prefix = await stream.read(LENGTH_BYTES)
                async with asyncio.timeout(self._config.request_timeout_s):
                    await self._answer(
                        stream, _request.decode(await stream.read(body_length(prefix)))
                    )
        finally:
            self._num_served -= 1

    async def _refuse(self, stream: Stream | None, reason: str, *, denied: bool = False) -> None:
        self.central_store.metrics.add(
            "kvhold_protocol_errors", reason="denied" if denied else "bad message"
        )
        self.central_store.metrics.add("kvhold_connections", result="refused")
        if stream is not None and not stream.closed:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_GREET_WITHIN_S):
                    await stream.send([encode(c.CentralRefused(reason, denied))])

    async def _answer(self, stream: Stream, request: c.Request) -> None:
        match request:
            case c.Check():
                await stream.send([encode(c.CentralDone())])
            case c.Probe():
                silent = set[str]()
                sizes = await self.central_store.probe(c.split_keys(request.keys), silent)
                await stream.send([encode(c.ValueSizes(sizes, whole=not silent))])
            case c.Get():
                await self._get(stream, request)
            case c.Put():
                await self._put(stream, request)
            case c.Delete():
                silent = set()
                removed = await self.central_store.delete(c.split_keys(request.keys), silent)
                await stream.send([encode(c.Removed(removed, whole=not silent))])
            case c.Scan():
                await self._scan(stream, request)

    async def _get(self, stream: Stream, request: c.Get) -> None:
        keys = c.split_keys(request.keys)
        starts = request.starts
        if (
            len(request.room) != len(keys)
            or (starts is not None and len(starts) != len(keys))
            or min(starts or [0]) < 0
        ):
            raise ProtocolError(
                "a get with lists of unequal length, or a range that begins before its value"
            )
        await self.central_store.bring(keys)
        sizes: list[int | None] = []
        pieces: list[memoryview] = []
        with self.central_store.all_lent(keys) as values:
            for at, value in enumerate(values):
                piece = (
                    None
                    if value is None
                    else _piece(value, request.room[at], None if starts is None else starts[at])
                )
                sizes.append(None if piece is None else len(piece))
                if piece is not None:
                    pieces.append(piece)
            await stream.send([encode(c.ValueSizes(sizes)), *pieces])

    async def _put(self, stream: Stream, request: c.Put) -> None:
        keys = c.split_keys(request.keys)
        if len(keys) != len(request.sizes) or min(request.sizes, default=1) < 1:
            raise ProtocolError("a put with lists of unequal length, or a value without bytes")
        ttl_s = request.ttl_s
        if ttl_s is not None and not ttl_s >= 0:
            raise ProtocolError(f"a time to live of {ttl_s} seconds")
        if ttl_s is not None and ttl_s > MAX_TTL_S:
            ttl_s = inf
        faults = [
            await self._receive(stream, key, size, ttl_s)
            for key, size in zip(keys, request.sizes, strict=True)
        ]
        await stream.send([encode(c.Stored(faults))])

    async def _receive(self, stream: Stream, key: bytes, nbytes: int, ttl_s: float | None) -> str:
        """Return the value's entry of `Stored`."""
        room: Entry | NotReserved = (
            self.central_store.reserve(key, nbytes, ttl_s)
            if nbytes <= self._config.max_value_bytes
            else "full"
        )
        if not isinstance(room, Entry):
            await stream.skip(nbytes)
            return "" if room == "stored" else room
        with on_error(lambda: self.central_store.ram.abandon(room)):
            await stream.read_into([self.central_store.ram.view(room)], nbytes)
        self.central_store.commit(room)
        return ""

    async def _scan(self, stream: Stream, request: c.Scan) -> None:
        if len(request.prefix) > KEY_BYTES or len(request.after) not in (0, KEY_BYTES):
            raise ProtocolError("a scan's prefix or last key has an invalid size")
        page = await self.central_store.scans.page(request.prefix, request.after, _PAGE_KEYS)
        await stream.send([encode(c.CentralKeys(b"".join(page.keys), page.more, page.whole))])


def _piece(value: memoryview, room: int, start: int | None) -> memoryview | None:
    if start is None:
        return value if len(value) <= room else None
    return value[start : start + room] if 0 < room <= len(value) - start else None


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"listen.address = {text!r}: write HOST:PORT, such as 127.0.0.1:{c.DEFAULT_PORT}"
        )
    return host.strip("[]"), int(port)


def _digest(token: str) -> bytes:
    """Return the token's digest. Comparing it does not reveal the token's length by its timing."""
    return blake2b(token.encode()).digest()


def _token(config: ListenConfig) -> str:
    token = (
        read_secret(config.token_file, where="listen.token_file")
        if config.token_file
        else config.token
    )
    if len(token.encode()) > c.MAX_TOKEN_BYTES:
        raise ConfigError(f"listen.token: the token must have at most {c.MAX_TOKEN_BYTES} bytes")
    return token


def _tls(config: ListenConfig) -> ssl.SSLContext | None:
    if not config.tls_cert:
        if config.tls_key or config.tls_client_ca:
            raise ConfigError("listen.tls_key and listen.tls_client_ca need listen.tls_cert")
        return None
    try:
        return server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
    except KVHoldError as error:
        raise ConfigError(f"listen.tls_{error}") from None
