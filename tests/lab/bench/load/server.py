"""A small HTTP server that streams as vLLM does, and misbehaves when asked: what the client is
tested against.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One request, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter

    async def whole(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """An answer of one piece."""
        head = (
            f"HTTP/1.1 {status} Said\r\nContent-Type: {content_type}\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def begin(self) -> None:
        """The head of a stream."""
        self.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: "
            b"chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def piece(self, data: bytes) -> None:
        """A piece of the stream."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def event(self, value: Any) -> None:
        """A whole event."""
        await self.piece(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def end(self) -> None:
        """The stream's end, in order."""
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def cut(self) -> None:
        """The connection's end, at once."""
        self.writer.transport.abort()


async def well(exchange: Exchange) -> None:
    """As vLLM answers: `max_tokens` tokens, their ids if asked, the usage, the end.

    Half of the prompt was cached.
    """
    body = exchange.body
    await exchange.begin()
    for number in range(body["max_tokens"]):
        is_last = number + 1 == body["max_tokens"]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        if "messages" in body:
            if not number:
                await exchange.event(
                    {
                        "choices": [
                            {
                                "index": 0,
                                "delta": {"role": "assistant", "content": ""},
                                "finish_reason": None,
                            }
                        ]
                    }
                )
            choice["delta"] = {"content": f" w{number}"}
        else:
            choice["text"] = f" w{number}"
            if body.get("return_token_ids"):
                choice["token_ids"] = [number]
        await exchange.event({"choices": [choice]})
    length = prompt_length(body)
    usage = {
        "prompt_tokens": length,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": length // 2},
    }
    await exchange.event({"choices": [], "usage": usage})
    await exchange.piece(b"data: [DONE]\n\n")
    await exchange.end()


def prompt_length(body: dict[str, Any]) -> int:
    """In tokens, or words."""
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    return len(body["prompt"].split() if isinstance(body["prompt"], str) else body["prompt"])


@dataclass
class TestServer:
    """A server that runs. answer: how it answers from now on; seen: requests so far."""

    __test__ = False

    port: int
    answer: Answer = well
    models: list[str] = field(default_factory=lambda: ["model"])
    models_page: bytes | None = None  # instead of them
    metrics: bytes | None = None
    seen: list[Exchange] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (exchange := await _read(reader, writer)) is not None:
                self.seen.append(exchange)
                if exchange.path == "/v1/models":
                    page = json.dumps({"data": [{"id": name} for name in self.models]}).encode()
                    await exchange.whole(
                        200, page if self.models_page is None else self.models_page
                    )
                elif exchange.path == "/metrics" and self.metrics is not None:
                    await exchange.whole(200, self.metrics, "text/plain")
                elif exchange.method == "GET":
                    await exchange.whole(404, b"{}")
                else:
                    await self.answer(exchange)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the server is closed
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[TestServer]:
    """A server on a free port; it ends with the block, and so does whatever it still waits for."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        await server.handle(reader, writer)

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    server = TestServer(listening.sockets[0].getsockname()[1])
    try:
        yield server
    finally:
        listening.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode().strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {
        name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Exchange(method, path, headers, json.loads(body) if body else None, writer)
