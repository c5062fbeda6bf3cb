"""Pools of connections to one server that are ready for commands.

Small commands have their own connections, so a lookup never waits behind values.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ProtocolError, TierDenied, TierError, TierUnavailable
from kvhold.net.pool import Exchange, Pool, run
from kvhold.net.stream import Address, Stream, open_stream
from kvhold.tiers.redis.resp import ErrorReply, Reply, command, fault_of, read_reply
from kvhold.tiers.redis.settings import RedisConfig

_SMALL_CONNECTIONS = 2


class Tls:
    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._context: ssl.SSLContext | None = None

    async def context(self) -> ssl.SSLContext | None:
        """None: no TLS. Raises TierDenied if its files cannot be used."""
        if self._config.tls and self._context is None:
            try:
                self._context = await asyncio.to_thread(_make_context, self._config)
            except OSError as error:
                raise TierDenied(
                    "redis", "connect", f"ca_file, cert_file or key_file cannot be used: {error}"
                ) from None
        return self._context


@dataclass(frozen=True)
class Login:
    """primary_only: refuse a server that is not a primary"""

    username: str = ""
    password: str = ""
    db: int = 0
    primary_only: bool = False


class RedisEndpoint:
    def __init__(self, address: Address, login: Login, *, tls: Tls, connections: int) -> None:
        self.address = address
        self._login = login
        self._tls = tls
        self._small = Pool(self._open, _SMALL_CONNECTIONS)
        self._bulk = Pool(self._open, connections)

    async def run(self, operation: str, exchanges: Sequence[Exchange], *, bulk: bool) -> None:
        """Never raises TierError."""
        await run(
            self._bulk if bulk else self._small,
            exchanges,
            fault=lambda error: self._fault(operation, error),
        )

    def close(self) -> None:
        self._small.close()
        self._bulk.close()

    async def _open(self) -> Stream:
        stream = await open_stream(self.address, await self._tls.context())
        with on_error(stream.close):
            await self._greet(stream)
        return stream

    async def _greet(self, stream: Stream) -> None:
        login = self._login
        words: list[tuple[str, ...]] = [("CLIENT", "SETNAME", "kvhold")]
        if login.password:
            words.insert(
                0,
                ("AUTH", login.username, login.password)
                if login.username
                else ("AUTH", login.password),
            )
        if login.db:
            words.append(("SELECT", str(login.db)))
        if login.primary_only:
            words.append(("ROLE",))
        await stream.send([command(*each) for each in words])
        for name, *_ in words:
            self._check_greeting(name, await read_reply(stream))

    def _check_greeting(self, name: str, reply: Reply) -> None:
        if isinstance(reply, ErrorReply):
            found = fault_of(reply, "connect")
            if name == "AUTH" and not isinstance(found, TierUnavailable):
                # the server's text may contain the password
                raise TierDenied(
                    "redis",
                    "connect",
                    f"{self.address} refuses this user and password ({reply.code})",
                )
            if name == "SELECT" and not isinstance(found, (TierUnavailable, TierDenied)):
                raise TierDenied(
                    "redis",
                    "connect",
                    f"{self.address} has no database {self._login.db}: {reply.text}",
                )
            if name == "CLIENT" and reply.code == "NOAUTH":
                raise TierDenied(
                    "redis",
                    "connect",
                    f"{self.address} needs a password: write redis://:password@... ({reply.code})",
                )
            if name == "CLIENT" and not isinstance(found, TierUnavailable):
                return
            raise found
        if name == "ROLE" and not (isinstance(reply, list) and reply and reply[0] == b"master"):
            raise TierUnavailable("redis", "connect", f"{self.address} is not a primary now")

    def _fault(self, operation: str, error: Exception) -> TierError:
        if isinstance(error, TierError):
            return error
        if isinstance(error, ProtocolError):
            return TierError(
                "redis", operation, f"{self.address} does not speak Redis' protocol: {error}"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return TierDenied(
                "redis",
                operation,
                f"{self.address}: its certificate is not accepted: {error.verify_message}",
            )
        hint = (
            "; this also happens if max_value_bytes is more than the server's proto-max-bulk-len"
            if operation == "put"
            else ""
        )
        return TierUnavailable(
            "redis", operation, f"{self.address}: {str(error) or type(error).__name__}{hint}"
        )


def _make_context(config: RedisConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.ca_file or None)
    context.check_hostname = config.verify == "full"
    if config.verify == "none":
        context.verify_mode = ssl.CERT_NONE
    if config.cert_file:
        context.load_cert_chain(config.cert_file, config.key_file or None)
    return context
