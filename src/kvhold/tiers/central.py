import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Self, TypeAlias, TypeVar

from kvhold.core.cleanup import on_error
from kvhold.core.errors import (
    ConfigError,
    ProtocolError,
    TierDenied,
    TierError,
    TierFull,
    TierIncomplete,
    TierUnavailable,
)
from kvhold.core.secrets import read_secret
from kvhold.core.setting import setting
from kvhold.core.store_options import MAX_TTL_S
from kvhold.net import central as c
from kvhold.net import login
from kvhold.net.addresses import is_loopback
from kvhold.net.pool import Exchange, Pool, run
from kvhold.net.stream import Address, Stream, open_stream
from kvhold.net.tls import client_context
from kvhold.net.wire import Decoder, encode
from kvhold.tiers.base import Parts, TierTraits, check_lengths, raise_if_all_failed, size_of
from kvhold.tiers.exchanges import Getting, batched, gettings, read_body
from kvhold.tiers.url import TierUrl

_MOST_QUOTED = 200
_BELOW = "a tier below the central cache did not answer; its log and status say which"
_greeting: Decoder[c.Greeting] = Decoder(c.Greeting)
_answer: Decoder[c.Answer] = Decoder(c.Answer)

Answer = TypeVar("Answer", bound=c.CentralMessage)
Connect: TypeAlias = Callable[[Address, ssl.SSLContext | None], Awaitable[Stream]]


@dataclass(frozen=True)
class CentralConfig:
    host: str = setting("", "the server")
    port: int = setting(c.DEFAULT_PORT, "the server's port", minimum=1)
    token: str = setting(
        "", "the server's token; better in the URL's password, or in a file", secret=True
    )
    token_file: str = setting("", "a file with the token")
    tls: bool = setting(False, "use TLS")
    insecure: bool = setting(
        False,
        "send the token to another host without TLS; anyone who listens on the network can read it",
    )
    ca_file: str = setting(
        "",
        "PEM file of the certificate authorities to trust for the server; empty: the system's",
    )
    cert_file: str = setting(
        "", "PEM file of the client's certificate, if the server requires one (mTLS)"
    )
    key_file: str = setting("", "PEM file of the certificate's key; empty: it is in cert_file")
    connections: int = setting(4, "connections that carry values", minimum=1)


class CentralTier:
    traits: ClassVar[TierTraits] = TierTraits(name="kvhold", shared=True, expires=True)

    def __init__(self, config: CentralConfig, *, connect: Connect = open_stream) -> None:
        """Raises ConfigError. A simulation passes its own `connect`."""
        if not config.host:
            raise ConfigError("kvhold: no server is named; write kvhold://host:7710")
        if not config.tls and (config.ca_file or config.cert_file or config.key_file):
            raise ConfigError(
                "kvhold: ca_file, cert_file and key_file are for TLS; write kvholds://... "
                "or tls=true"
            )
        self._config = config
        self._connect = connect
        self._address = Address(config.host, config.port)
        self._token = (
            read_secret(config.token_file, where="kvhold: token_file")
            if config.token_file
            else config.token
        )
        if len(self._token.encode()) > login.MAX_TOKEN_BYTES:
            raise ConfigError(f"kvhold: token: at most {login.MAX_TOKEN_BYTES} bytes are allowed")
        if self._token and not config.tls and not config.insecure and not is_loopback(config.host):
            raise ConfigError(
                f"kvhold: {self._address}: the token would cross the network in clear text; "
                f"write kvholds://... (TLS), or insecure=true if the network is trusted"
            )
        self._tls = (
            client_context(config.ca_file, config.cert_file, config.key_file)
            if config.tls
            else None
        )
        self._pool = Pool(self._open, config.connections)
        self._questions = Pool(self._open, 2)  # small exchanges do not wait for values

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        if len(url.hosts) != 1 or url.path not in ("", "/"):
            raise ConfigError(f"tiers: {url.shown}: write kvhold://host:{c.DEFAULT_PORT}")
        if url.username:
            raise ConfigError(
                f"tiers: {url.shown}: there are no users, only a token; write "
                "kvhold://:TOKEN@host, with a colon before the token"
            )
        (host, port) = url.hosts[0]
        base = CentralConfig(
            host=host, port=port or c.DEFAULT_PORT, token=url.password, tls=url.scheme == "kvholds"
        )
        return cls(url.apply(base))

    async def check(self) -> None:
        await self._call("check", c.Check(), c.CentralDone)

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        if not keys:
            return []
        answer = await self._call("probe", c.Probe(b"".join(keys)), c.ValueSizes)
        self._same_length("probe", keys, answer.sizes)
        missing = None if answer.whole else TierIncomplete("kvhold", "probe", _BELOW)
        return [missing if size is None else size for size in answer.sizes]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        batches = [_GetBatch(batch) for batch in batched(gettings(keys, into, starts))]
        await run(self._pool, batches, fault=lambda error: self._fault("get", error))
        raise_if_all_failed([batch.fault for batch in batches])
        return [batch.fault or one.size for batch in batches for one in batch.items]

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        if ttl_s is not None and ttl_s != inf:  # rounding up to seconds may exceed the limit
            ttl_s = min(ttl_s, MAX_TTL_S)
        batches = [
            _PutBatch(batch, ttl_s)
            for batch in batched([_Putting(key, parts) for key, parts in items])
        ]
        await run(self._pool, batches, fault=lambda error: self._fault("put", error))
        raise_if_all_failed([batch.fault for batch in batches])
        return [batch.fault or self._stored(why) for batch in batches for why in batch.faults]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        answer = await self._call("delete", c.Delete(b"".join(keys)), c.Removed)
        self._same_length("delete", keys, answer.removed)
        if not answer.whole:
            raise TierIncomplete("kvhold", "delete", _BELOW)
        return answer.removed

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """If the server has forgotten the scan, some keys come twice."""
        after, more = b"", True
        while more:
            page = await self._call("scan", c.Scan(prefix, after), c.CentralKeys)
            if not page.whole:
                raise TierIncomplete("kvhold", "scan", _BELOW)
            try:
                keys = c.split_keys(page.keys)
            except ValueError as error:
                raise TierError("kvhold", "scan", str(error)) from None
            for key in keys:
                yield key
            after, more = (keys[-1] if keys else after), page.more and bool(keys)

    async def close(self) -> None:
        self._pool.close()
        self._questions.close()

    async def _open(self) -> Stream:
        stream = await self._connect(self._address, self._tls)
        with on_error(stream.close):
            await stream.send(
                [encode(login.LoginHello(c.CENTRAL_MAGIC, c.CENTRAL_VERSION, self._token))]
            )
            greeting = _greeting.decode(await read_body(stream, login.MAX_HELLO_BYTES))
        if isinstance(greeting, login.LoginRefused):
            stream.close()
            kind = TierDenied if greeting.denied else TierUnavailable
            raise kind("kvhold", "connect", f"{self._address}: {greeting.reason[:_MOST_QUOTED]}")
        return stream

    async def _call(
        self, operation: str, request: c.CentralMessage, expected: type[Answer]
    ) -> Answer:
        question = _Question(request)
        await run(self._questions, [question], fault=lambda error: self._fault(operation, error))
        if question.fault is not None:
            raise question.fault
        if not isinstance(question.answer, expected):
            raise TierError(
                "kvhold",
                operation,
                f"{self._address}: answered with {type(question.answer).__name__}, not with "
                f"{expected.__name__}",
            )
        return question.answer

    def _fault(self, operation: str, error: Exception) -> TierError:
        if isinstance(error, TierError):
            return error
        where = f"{self._address}: "
        if isinstance(error, ProtocolError):
            return TierError(
                "kvhold", operation, f"{where}is not a central cache of this version: {error}"
            )
        return TierUnavailable("kvhold", operation, f"{where}{str(error) or type(error).__name__}")

    def _stored(self, why: str) -> TierError | None:
        if not why:
            return None
        return (
            TierFull("kvhold", "put", f"{self._address}: no room")
            if why == "full"
            else TierError("kvhold", "put", why)
        )

    def _same_length(
        self, operation: str, keys: Sequence[bytes], answers: Sequence[object]
    ) -> None:
        if len(keys) != len(answers):
            raise TierError(
                "kvhold", operation, f"{self._address}: {len(answers)} answers to {len(keys)} keys"
            )


class _Question(Exchange):
    def __init__(self, request: c.CentralMessage) -> None:
        self.request = [encode(request)]
        self.answer: c.Answer | None = None

    async def take(self, stream: Stream) -> None:
        self.answer = _answer.decode(await read_body(stream))


@dataclass
class _Putting:
    key: bytes
    parts: Parts

    @property
    def nbytes(self) -> int:
        return size_of(self.parts)


class _GetBatch(Exchange):
    def __init__(self, items: list[Getting]) -> None:
        self.items = items
        self.value_bytes = sum(one.nbytes for one in items)
        starts = [one.start for one in items if one.start is not None]
        self.request = [
            encode(
                c.Get(
                    b"".join(one.key for one in items),
                    [one.nbytes for one in items],
                    starts or None,
                )
            )
        ]

    async def take(self, stream: Stream) -> None:
        answer = _answer.decode(await read_body(stream))
        if not isinstance(answer, c.ValueSizes) or len(answer.sizes) != len(self.items):
            raise ProtocolError(
                f"the answer to a get of {len(self.items)} keys has a wrong number of sizes"
            )
        for one, size in zip(self.items, answer.sizes, strict=True):
            await one.take(stream, size)


class _PutBatch(Exchange):
    def __init__(self, items: list[_Putting], ttl_s: float | None) -> None:
        self.faults = [""] * len(items)
        self.value_bytes = sum(one.nbytes for one in items)
        head = encode(
            c.Put(b"".join(one.key for one in items), [one.nbytes for one in items], ttl_s)
        )
        self.request = [head, *(part for one in items for part in one.parts)]

    async def take(self, stream: Stream) -> None:
        answer = _answer.decode(await read_body(stream))
        if not isinstance(answer, c.Stored) or len(answer.faults) != len(self.faults):
            raise ProtocolError(
                f"the answer to a put of {len(self.faults)} keys has a wrong number of results"
            )
        self.faults = answer.faults
