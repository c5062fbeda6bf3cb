"""Streams and times completions of an OpenAI-compatible server.

A failure is a reply with an error, such as "timeout".
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import msgspec

from kvhold.core.errors import UNDECODABLE, ConfigError
from kvhold_lab.bench.load.events import BadStream, EventLines, EventStream
from kvhold_lab.bench.load.work import Reply, Request, Turn
from kvhold_lab.bench.rows import needing

with needing("'kvhold[lab]'"):
    import aiohttp

Api = Literal["completions", "chat"]

_MOST_OF_AN_ERROR = 2_000
_MOST_OF_A_PAGE = 64 << 20


@dataclass(frozen=True)
class Endpoint:
    """base_url: without a path, /v1 is added
    api_key: in no message
    ignore_eos: request full length; other servers than vLLM and SGLang may refuse
    """

    base_url: str
    model: str
    api: Api = "completions"
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    user_header: str | None = None
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0

    @property
    def root_url(self) -> str:
        parts = urlsplit(self.base_url)
        return f"{parts.scheme}://{parts.netloc}"


def checked_url(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(
            f"base URL {base_url!r}: {error}; write it as http://localhost:8000/v1"
        ) from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port_is_fine
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(f"base URL {base_url!r} is none; write it as http://localhost:8000/v1")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "a base URL has no credentials; put the key into the environment, as OPENAI_API_KEY"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


class LoadClient:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        endpoint = self._endpoint
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=endpoint.timeout_s, sock_connect=endpoint.connect_timeout_s
            ),
            headers={"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {},
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._open().close()

    async def send(self, request: Request) -> Reply:
        endpoint = self._endpoint
        as_tokens = isinstance(request.turns[0].content, list)
        body = msgspec.json.encode(_body(endpoint, request, as_tokens=as_tokens))
        path = "chat/completions" if endpoint.api == "chat" else "completions"
        url, headers = f"{endpoint.base_url}/{path}", {"Content-Type": "application/json"}
        if endpoint.user_header is not None and "user" in request.labels:
            headers[endpoint.user_header] = str(request.labels["user"])
        began = time.perf_counter()
        stream = EventStream(
            began, content="tokens" if as_tokens and request.needs_content else "text"
        )
        kind, detail = "", ""
        try:
            async with self._open().post(
                url, data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status == 200:
                    await _follow(response, stream)
                else:
                    kind = f"http {response.status}"
                    detail = (await response.content.read(_MOST_OF_AN_ERROR)).decode(
                        errors="replace"
                    )
        except (aiohttp.ClientError, OSError, BadStream) as error:
            kind, detail = _kind(error), str(error) or type(error).__name__
        reply = stream.reply(time.perf_counter())
        return replace(reply, error=kind, detail=detail) if kind else reply

    async def only_model(self) -> str:
        url = f"{self._endpoint.base_url}/models"
        try:
            names = [model["id"] for model in msgspec.json.decode(await self._page(url))["data"]]
        except (
            aiohttp.ClientError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            *UNDECODABLE,
        ) as error:
            raise ConfigError(
                f"{url}: {str(error) or type(error).__name__}; is the server up? Name the "
                "model with --model"
            ) from None
        if len(names) != 1:
            raise ConfigError(
                f"the server has {len(names)} models ({', '.join(map(str, names[:8]))}); "
                "choose with --model"
            )
        return str(names[0])

    async def metrics_page(self) -> str | None:
        try:
            return (await self._page(f"{self._endpoint.root_url}/metrics")).decode(errors="replace")
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    async def _page(self, url: str) -> bytes:
        async with self._open().get(
            url, timeout=aiohttp.ClientTimeout(total=30), raise_for_status=True
        ) as response:
            page = bytearray()
            async for received in response.content.iter_any():
                page += received
                if len(page) > _MOST_OF_A_PAGE:
                    raise ValueError(f"a page of more than {_MOST_OF_A_PAGE >> 20} MiB")
            return bytes(page)

    def _open(self) -> "aiohttp.ClientSession":
        assert self._session is not None, "used outside of its `async with`"
        return self._session


async def _follow(response: "aiohttp.ClientResponse", stream: EventStream) -> None:
    lines = EventLines()
    async for received in response.content.iter_any():
        now = time.perf_counter()
        for data in lines.feed(received):
            stream.add(data, now)


def _body(endpoint: Endpoint, request: Request, *, as_tokens: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.api == "chat":
        body["messages"] = [
            {"role": turn.role, "content": turn.content} for turn in _merged(request.turns)
        ]
    elif as_tokens:
        body["prompt"] = list(chain.from_iterable(turn.content for turn in request.turns))
    else:
        body["prompt"] = "".join(str(turn.content) for turn in request.turns)
    if endpoint.ignore_eos:
        body["ignore_eos"] = True
    if as_tokens and request.needs_content:
        body["return_token_ids"] = True
    return body | dict(endpoint.extra_body)


def _merged(turns: tuple[Turn, ...]) -> list[Turn]:
    """Many chat templates require different roles in turn."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and merged[-1].role == turn.role:
            merged[-1] = Turn(turn.role, f"{merged[-1].content}{turn.content}")
        else:
            merged.append(turn)
    return merged


def _kind(error: Exception) -> str:
    if isinstance(error, BadStream):
        return "bad stream"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.InvalidURL)):
        return "connect"
    return "disconnected"
