"""The JSON gateway of etcd 3.4 and later.

Endpoints are tried in turn. Passwords and tokens are in no error. One event loop.
"""

import ssl
from collections.abc import Sequence
from typing import TypeVar

import aiohttp
import msgspec

from kvhold.core.errors import UNDECODABLE, TierError, TierUnavailable
from kvhold.tiers.peers.faults import TIER

_MOST_ANSWER_BYTES = 1 << 20
_MOST_QUOTED = 200
_CALLS_S = 3.0  # for all endpoints
_LEAST_CALL_S = 0.5
_TOKEN_IS_OLD = ("invalid auth token", "revision of auth store is old")

Answer = TypeVar("Answer")


class KeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    lease: int = 0


class RangeRequest(msgspec.Struct):
    key: bytes
    range_end: bytes
    limit: int


class RangeAnswer(msgspec.Struct):
    """count: of all keys, also beyond the limit"""

    kvs: list[KeyValue] = []
    count: int = 0


class PutRequest(msgspec.Struct):
    key: bytes
    value: bytes
    lease: int


class GrantRequest(msgspec.Struct):
    TTL: int


class LeaseRequest(msgspec.Struct):
    ID: int


class LeaseAnswer(msgspec.Struct):
    """TTL: 0: there is no such lease"""

    ID: int = 0
    TTL: int = 0


class KeepAliveAnswer(msgspec.Struct):
    result: LeaseAnswer


class Ignored(msgspec.Struct):
    pass


class _Login(msgspec.Struct):
    name: str
    password: str


class _Token(msgspec.Struct):
    token: str


class _Failure(msgspec.Struct):
    message: str = ""


class EtcdGateway:
    def __init__(
        self, endpoints: Sequence[str], *, user: str, password: str, tls: ssl.SSLContext | None
    ) -> None:
        """endpoints: such as http://127.0.0.1:2379; user: empty: without a login."""
        self._endpoints = list(endpoints)
        self._user, self._password = user, password
        self._tls = tls
        self._token = ""
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, request: msgspec.Struct, kind: type[Answer]) -> Answer:
        if self._user and not self._token:
            await self._log_in()
        try:
            return await self._call(path, request, kind)
        except TierError as error:
            if not self._user or not any(part in str(error) for part in _TOKEN_IS_OLD):
                raise
        await self._log_in()
        return await self._call(path, request, kind)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _log_in(self) -> None:
        self._token = ""
        login = _Login(self._user, self._password)
        self._token = (await self._call("auth/authenticate", login, _Token)).token

    async def _call(self, path: str, request: msgspec.Struct, kind: type[Answer]) -> Answer:
        fault: TierError | None = None
        call_s = max(_LEAST_CALL_S, _CALLS_S / len(self._endpoints))
        for endpoint in list(self._endpoints):
            try:
                status, body = await self._post(f"{endpoint}/v3/{path}", request, call_s)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                fault = _fault(endpoint, str(error) or f"no answer within {call_s:g} s")
            else:
                if status != 503:
                    self._endpoints.remove(endpoint)
                    self._endpoints.insert(0, endpoint)
                    return _decode(endpoint, path, status, body, kind)
                fault = _fault(endpoint, _reason(status, body))
        assert fault is not None
        raise fault

    async def _post(self, url: str, request: msgspec.Struct, call_s: float) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = self._token
        async with self._session.post(
            url,
            data=msgspec.json.encode(request),
            headers=headers,
            ssl=True if self._tls is None else self._tls,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=call_s),
        ) as response:
            body = bytearray()
            while piece := await response.content.read(64 << 10):
                body += piece
                if len(body) > _MOST_ANSWER_BYTES:
                    raise OSError(f"an answer of more than {_MOST_ANSWER_BYTES} bytes")
            return response.status, bytes(body)


def _decode(endpoint: str, path: str, status: int, body: bytes, kind: type[Answer]) -> Answer:
    if status != 200 or body.startswith(b'{"error"'):
        raise _fault(endpoint, _reason(status, body))
    try:
        # int64 comes as text
        return msgspec.json.decode(body, type=kind, strict=False)
    except UNDECODABLE as error:
        raise _fault(endpoint, f"the answer to {path} cannot be read: {error}") from None


def _fault(endpoint: str, why: str) -> TierUnavailable:
    return TierUnavailable(TIER, "list", f"etcd at {endpoint}: {why[:_MOST_QUOTED]}")


def _reason(status: int, body: bytes) -> str:
    try:
        failure = msgspec.json.decode(body, type=_Failure)
    except UNDECODABLE:
        failure = _Failure()
    return failure.message or f"HTTP status {status}"
