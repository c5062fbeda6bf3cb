"""HTTP calls to engines. Every failure is an EngineFault.

Closing an answer early stops the engine. Bytes pass without decompression.
"""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from yarl import URL

from kvhold.core.errors import ConfigError
from kvhold.core.proxy_config import ProxyConfig
from kvhold.net.tls import client_context
from kvhold.proxy.engines import ProxiedEngine
from kvhold.proxy.faults import EngineFault
from kvhold.proxy.headers import Headers

_BUFFERED_BYTES = 1 << 20
_PROBE_BYTES = 64 << 10
_KEEPALIVE_S = 3.0  # vLLM's server closes idle connections after 5 s


@dataclass(frozen=True)
class EngineCall:
    method: str
    path: str
    headers: Headers
    body: bytes = b""


class EngineAnswer:
    def __init__(self, response: aiohttp.ClientResponse, idle_timeout_s: float) -> None:
        self._response = response
        self._idle_timeout_s = idle_timeout_s
        self._first: list[bytes] = []
        self._is_at_end = False
        self.status: int = response.status
        self.headers: Headers = list(response.headers.items())

    @property
    def content_length(self) -> int | None:
        length: int | None = self._response.content_length
        return length

    @property
    def is_event_stream(self) -> bool:
        return bool(self._response.content_type == "text/event-stream")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises EngineFault: the answer is cut."""
        for piece in self._first:
            yield piece
        while not self._is_at_end and (piece := await self._next(self._idle_timeout_s)):
            yield piece

    async def read(self, most_bytes: int) -> bytes:
        """Raises EngineFault: it is cut, or larger."""
        parts, num_bytes = [], 0
        async for piece in self.pieces():
            parts.append(piece)
            num_bytes += len(piece)
            if num_bytes > most_bytes:
                raise EngineFault("invalid", f"its answer is larger than {most_bytes} bytes")
        return b"".join(parts)

    async def read_first(self) -> None:
        self._first.append(await self._next(None))
        length = self.content_length
        if self.is_event_stream or length is None or length > _BUFFERED_BYTES:
            return
        while not self._is_at_end:
            self._first.append(await self._next(self._idle_timeout_s))

    def close(self) -> None:
        if self._is_at_end:
            self._response.release()
        else:
            self._response.close()

    async def _next(self, timeout_s: float | None) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                piece: bytes = await self._response.content.readany()
        except TimeoutError:
            raise EngineFault("timeout", "its answer stopped (proxy.idle_timeout_s)") from None
        except (aiohttp.ClientError, OSError) as error:
            raise fault_of(error) from None
        self._is_at_end = not piece
        return piece


class EngineCalls:
    def __init__(self, config: ProxyConfig) -> None:
        """Call this in the event loop. Raises ConfigError: `engine_ca_file` is unusable."""
        self._config = config
        tls: ssl.SSLContext | bool = True
        if config.engine_ca_file:
            try:
                tls = client_context(config.engine_ca_file, "", "")
            except ConfigError as error:
                raise ConfigError(f"proxy.engine_{error}") from None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=config.max_header_bytes,
            max_field_size=config.max_header_bytes,
        )

    async def close(self) -> None:
        await self._session.close()

    async def open(self, engine: ProxiedEngine, call: EngineCall) -> EngineAnswer:
        """Return when the answer's first bytes have arrived. Raises EngineFault."""
        timeout_s = self._config.first_byte_timeout_s
        due = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(due) as until:
                with engine.waiting(until):
                    return await self._open(engine, call)
        except TimeoutError:
            if until.when() != due:
                raise EngineFault("silent", "it answers no probes") from None
            raise EngineFault("timeout", f"no answer within {timeout_s:g} s") from None

    async def _open(self, engine: ProxiedEngine, call: EngineCall) -> EngineAnswer:
        answer: EngineAnswer | None = None
        try:
            response = await self._session.request(
                call.method,
                URL(engine.url + call.path, encoded=True),
                headers=call.headers,
                data=_payload(call.body),
                allow_redirects=False,
            )
            answer = EngineAnswer(response, self._config.idle_timeout_s)
            await answer.read_first()
        except BaseException as error:
            if answer is not None:
                answer.close()
            if isinstance(error, (aiohttp.ClientError, OSError)):
                raise fault_of(error) from None
            raise
        return answer

    async def probe(self, engine: ProxiedEngine, headers: Headers) -> None:
        """Raises EngineFault unless the engine is healthy."""
        call = EngineCall("GET", self._config.probe_path, headers)
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                answer = await self._open(engine, call)
                try:
                    await answer.read(_PROBE_BYTES)
                finally:
                    answer.close()
        except TimeoutError:
            raise EngineFault("timeout", "no answer to a probe (proxy.probe_timeout_s)") from None
        if answer.status != 200:
            raise EngineFault("status", f"answered {answer.status} to a probe")


def fault_of(error: BaseException) -> EngineFault:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return EngineFault("timeout", "cannot connect (proxy.connect_timeout_s)", is_sent=False)
    if isinstance(error, aiohttp.ClientConnectorError):
        return EngineFault("refused", f"cannot connect: {_text(error)}", is_sent=False)
    if isinstance(error, (aiohttp.ClientResponseError, aiohttp.InvalidURL)):
        return EngineFault("invalid", f"not a valid answer: {_text(error)}")
    return EngineFault("disconnected", f"the connection broke: {_text(error)}")


def _text(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error.strerror or error.os_error)
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{error.status} {error.message}"[:200]
    return type(error).__name__


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    return io.BytesIO(body) if len(body) > _BUFFERED_BYTES else body or None
