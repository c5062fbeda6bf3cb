"""A stream of NATS JetStream.

    subject: STREAM.<incarnation, 16 hexadecimal digits>

Each event loop has its own `NatsBus`. No password or token is in an error.
"""

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)

from kvhold.core.errors import ConfigError, KVHoldError, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.core.secrets import read_secret
from kvhold.net.addresses import is_loopback
from kvhold.net.login import quoted
from kvhold.net.stream import Address
from kvhold.net.tls import client_context
from kvhold.tiers.peers.bus import MOST_SEALED_BYTES, BusConfig, Inboxes, wait_for_end
from kvhold.tiers.peers.directory import parse_address
from kvhold.tiers.peers.faults import TIER

log = logging.getLogger(__name__)

NATS_PORT = 4222
_SCHEME = "nats://"
_MOST_SERVERS = 16
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CONNECT_S = 2
_CALL_S = 2.0
_CLOSE_S = 1.0
_PING_S = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MOST_PENDING_BYTES, _MOST_PENDING = 16 << 20, 20_000  # more are dropped: a gap
_MOST_QUOTED = 200
_FAULTS = (nats.errors.Error, OSError, EOFError, TimeoutError, ValueError, KeyError, TypeError)


class NatsBus:
    def __init__(self, config: BusConfig) -> None:
        self._config = config
        self._servers = _servers_of(config.bus)
        self._user, self._password, self._token = _login_of(config)
        if not _STREAM.fullmatch(config.bus_stream):
            raise ConfigError(
                "peers: bus_stream: write 1 to 64 letters, digits, - and _, such as kvhold-peers"
            )
        files = (config.bus_ca_file, config.bus_cert_file, config.bus_key_file)
        if any(files) and not config.bus_tls:
            raise ConfigError(
                "peers: bus_ca_file, bus_cert_file and bus_key_file are for TLS; add bus_tls=true"
            )
        for server in self._servers:
            if not (config.bus_tls or config.bus_insecure or is_loopback(server.host)):
                raise ConfigError(
                    f"peers: bus: {server}: it would be used in clear text; add bus_tls=true, or "
                    "bus_insecure=true if the network is trusted"
                )
        try:
            self._tls = client_context(*files) if config.bus_tls else None
        except KVHoldError as error:
            raise ConfigError(f"peers: bus_{error}") from None
        self.source = f"NATS at {','.join(str(server) for server in self._servers)}"
        self.fault, self._is_reported = "not connected yet", False

    async def read(self, inboxes: Inboxes) -> None:
        pause_s, number = _FIRST_PAUSE_S, 0
        while True:
            try:
                async with self.connected() as session:
                    subscription = await session.subscribe(inboxes, after=number)
                    pause_s = _FIRST_PAUSE_S
                    try:
                        await subscription.ended()
                    finally:
                        number = subscription.number
            except TierUnavailable:
                pass
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["NatsSession"]:
        server = self._servers[0]
        self._servers.append(self._servers.pop(0))
        client = _Client(must_use_tls=self._tls is not None)
        session = NatsSession(client, self._config)
        try:
            try:
                await client.connect(
                    servers=[f"{_SCHEME}{server}"],
                    name="kvhold",
                    allow_reconnect=False,
                    # else nats-py tries a lost server for two minutes
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=_CONNECT_S,
                    ping_interval=_PING_S,
                    max_outstanding_pings=2,
                    user=self._user or None,
                    password=self._password or None,
                    token=self._token or None,
                    tls=self._tls,
                    tls_hostname=server.host if self._tls else None,
                    error_cb=session.note,
                    closed_cb=session.closed,
                )
                await session.find_stream()
                self._mended(server)
                yield session
                if session.has_ended:
                    raise ConnectionError("the connection has ended")
            finally:
                await client.end()
        except _FAULTS as error:
            if isinstance(error, nats.errors.NoServersError):
                error = session.last_error or error
            why = quoted(str(error) or type(error).__name__, _MOST_QUOTED)
            self._failed(server, why)
            raise TierUnavailable(TIER, "bus", self.fault) from None

    async def check(self) -> list[str]:
        faults = []
        for _ in list(self._servers):
            try:
                async with self.connected() as session:
                    await session.subscribe(Inboxes(Metrics()), after=0)
            except TierUnavailable:
                faults.append(self.fault)
        return faults

    def _mended(self, server: Address) -> None:
        if self.fault:
            log.info("peers: connected to NATS at %s", server)
        self.fault, self._is_reported = "", False

    def _failed(self, server: Address, why: str) -> None:
        self.fault = f"NATS at {server}: {why}"
        if not self._is_reported:
            log.warning("peers: %s; changes go over connections to each peer", self.fault)
        self._is_reported = True


class NatsSession:
    def __init__(self, client: Client, config: BusConfig) -> None:
        self._client, self._config = client, config
        self._jetstream: JetStreamContext = client.jetstream(timeout=_CALL_S)
        self._ended = asyncio.Event()
        self._last_number = 0
        self.last_error: Exception | None = None

    async def closed(self) -> None:
        self._ended.set()

    async def note(self, error: Exception) -> None:
        self.last_error = error
        level = logging.DEBUG if isinstance(error, nats.errors.Error | OSError) else logging.ERROR
        log.log(level, "peers: NATS: %s", type(error).__name__)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def find_stream(self) -> None:
        config = self._config
        try:
            found: StreamInfo = await self._jetstream.stream_info(config.bus_stream)
        except nats.js.errors.NotFoundError:
            found = await self._jetstream.add_stream(
                StreamConfig(
                    name=config.bus_stream,
                    subjects=[f"{config.bus_stream}.*"],
                    max_age=config.bus_keep_s,
                    max_bytes=config.bus_keep_bytes,
                    max_msg_size=MOST_SEALED_BYTES,
                    discard=DiscardPolicy.OLD,
                    storage=StorageType.MEMORY,
                    duplicate_window=min(config.bus_keep_s, 10.0),
                )
            )
        self._last_number = found.state.last_seq

    async def publish(self, incarnation: int, data: bytes) -> None:
        stream = self._config.bus_stream
        await self._jetstream.publish(f"{stream}.{incarnation:016x}", data, stream=stream)

    async def subscribe(self, inboxes: Inboxes, *, after: int) -> "_Subscription":
        """after: number of the last message that was read; 0: only new ones"""
        stream = self._config.bus_stream
        subscription = _Subscription(inboxes, after, self._ended)
        resumes = 0 < after <= self._last_number
        await self._jetstream.subscribe(
            f"{stream}.*",
            stream=stream,
            cb=subscription.take,
            manual_ack=True,
            config=ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE if resumes else DeliverPolicy.NEW,
                opt_start_seq=after + 1 if resumes else None,
                ack_policy=AckPolicy.NONE,
                mem_storage=True,
            ),
            pending_msgs_limit=_MOST_PENDING,
            pending_bytes_limit=_MOST_PENDING_BYTES,
        )
        return subscription


class _Subscription:
    def __init__(self, inboxes: Inboxes, number: int, ended: asyncio.Event) -> None:
        self._inboxes = inboxes
        self.number = number
        self._ended = ended
        self._num_taken = 0

    async def take(self, message: Msg) -> None:
        self._num_taken += 1
        # a message sent to this inbox, not to the stream, has no number
        with suppress(nats.errors.Error, ValueError, IndexError):
            self.number = message.metadata.sequence.stream
        self._inboxes.put(_incarnation_of(message.subject), message.data)

    async def ended(self) -> None:
        await wait_for_end(self._ended, lambda: self._num_taken)


class _Client(Client):  # type: ignore[misc]  # it may not be installed
    """Sends nothing in clear text if TLS is wanted, which nats-py cannot ensure."""

    def __init__(self, *, must_use_tls: bool) -> None:
        super().__init__()
        self._must_use_tls = must_use_tls

    async def end(self) -> None:
        try:
            with suppress(*_FAULTS):
                async with asyncio.timeout(_CLOSE_S):
                    await self.close()
        finally:
            if self._transport is not None:
                self._transport.close()

    def _connect_command(self) -> bytes:
        if self._must_use_tls and not self._server_info.get("tls_required"):
            raise ConnectionError("the server does not use TLS; correct it, or bus_tls")
        command: bytes = super()._connect_command()
        return command


def _servers_of(text: str) -> list[Address]:
    """Raises ConfigError without the setting, which may hold a password."""
    names = text.removeprefix(_SCHEME).split(",")
    if not text.startswith(_SCHEME) or "@" in text or "/" in text.removeprefix(_SCHEME):
        raise ConfigError(
            "peers: bus: write nats://HOST:PORT,HOST:PORT; logins are bus_user, "
            "bus_password_file and bus_token_file"
        )
    if not 0 < len(names) <= _MOST_SERVERS:
        raise ConfigError(f"peers: bus: name 1 to {_MOST_SERVERS} servers of NATS")
    return [parse_address(name, where="peers: bus", default_port=NATS_PORT) for name in names]


def _login_of(config: BusConfig) -> tuple[str, str, str]:
    password, token = config.bus_password, config.bus_token
    if config.bus_password_file:
        password = read_secret(config.bus_password_file, where="peers: bus_password_file")
    if config.bus_token_file:
        token = read_secret(config.bus_token_file, where="peers: bus_token_file")
    if bool(config.bus_user) != bool(password) or (password and token):
        raise ConfigError(
            "peers: bus: a login is bus_user with bus_password_file, or bus_token_file alone"
        )
    return config.bus_user, password, token


def _incarnation_of(subject: str) -> int | None:
    digits = subject.rpartition(".")[2]
    return int(digits, 16) if re.fullmatch(r"[0-9a-f]{16}", digits) else None
