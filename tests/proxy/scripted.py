"""Engines that answer as a test says, and a proxy before them: real HTTP servers on loopback."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from kvhold.core.proxy_config import ProxyConfig
from kvhold.core.setting import apply
from kvhold.proxy.engines import ProxiedEngine
from kvhold.proxy.server import ProxyServer
from kvhold_lab.servers.base import free_port

PATIENT_S = 60.0  # nothing that works takes nearly as long
LONG = "word " * 200
PREFILL_PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "h"}
FAST = {
    "probe_interval_s": 0.05,
    "probe_max_interval_s": 0.2,
    "drain_timeout_s": 5.0,
    "queue_timeout_s": PATIENT_S,
    "prefill_timeout_s": PATIENT_S,
    "skip_answered_s": 0,
}


@dataclass
class Seen:
    """A request that an engine has got."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    raw: bytes
    body: Any = field(default=None)

    @property
    def params(self) -> Any:
        return self.body.get("kv_transfer_params")

    @property
    def is_prefill(self) -> bool:
        return bool(self.body.get("max_tokens") == 1)


Script = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


class ScriptedEngine:
    """An engine that answers at once, unless `script` says otherwise.

    left: requests whose connection was closed before their answer
    """

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.port = free_port()
        self.seen: list[Seen] = []
        self.probes = 0
        self.left = 0
        self.is_healthy = True
        self.is_silent = False
        self.script: Script = self.answer
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """From now on it refuses connections."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        """Answer with this engine's name, and the prompt's length."""
        if not isinstance(seen.body, dict):
            return web.json_response({"engine": self.name})
        if seen.body.get("stream"):
            return await self.stream(request, 3)
        content: dict[str, Any] = {"engine": self.name, "choices": [{"text": "a"}]}
        if (seen.params or {}).get("do_remote_decode"):
            content["kv_transfer_params"] = PREFILL_PARAMS
        return web.json_response(content)

    async def stream(
        self, request: web.Request, events: int, then: Awaitable[object] | None = None
    ) -> web.StreamResponse:
        """then: awaited after the first event"""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(events):
            await response.write(b'data: {"n": %d}\n\n' % number)
            if number == 0 and then is not None:
                await then
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            self.probes += 1
            if self.is_silent:
                await asyncio.sleep(10 * PATIENT_S)
            return web.Response(status=200 if self.is_healthy else 503)
        raw = await request.read()
        seen = Seen(
            request.method,
            request.raw_path,
            {name.lower(): value for name, value in request.headers.items()},
            raw,
        )
        try:
            seen.body = json.loads(raw) if raw else None
        except ValueError:
            seen.body = None
        self.seen.append(seen)
        try:
            return await self.script(request, seen)
        except asyncio.CancelledError:
            self.left += 1
            raise


def answers(status: int, **headers: str) -> Script:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"error": {"message": "scripted"}}, status=status, headers=headers)

    return script


def writes(raw: bytes) -> Script:
    """Write these bytes to the connection, and close it."""

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        assert isinstance(request.transport, asyncio.WriteTransport)
        request.transport.write(raw)
        request.transport.close()
        return web.Response()

    return script


async def never(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Do not answer."""
    await asyncio.sleep(10 * PATIENT_S)
    return web.Response()


class RunningProxy:
    """A proxy, and a client of it."""

    def __init__(self, server: ProxyServer, client: aiohttp.ClientSession) -> None:
        self.server = server
        self.client = client
        self.url = f"http://127.0.0.1:{server.port}"

    async def complete(self, prompt: Any = LONG, **fields: Any) -> tuple[int, Any]:
        """Return the status and the JSON of a completion."""
        body = {"prompt": prompt, "max_tokens": 8, **fields}
        return await self.post("/v1/completions", body)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum over all samples with these labels."""
        _, text = await self.get("/metrics")
        total = 0.0
        for line in text.splitlines():
            if line.startswith((f"kvhold_proxy_{name}{{", f"kvhold_proxy_{name} ")) and all(
                f'{label}="{value}"' in line for label, value in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def engine(self, scripted: ScriptedEngine) -> ProxiedEngine:
        """Return the proxy's view of an engine."""
        return next(one for one in self.server._engines if one.url == scripted.url)

    def has_probed(self, scripted: ScriptedEngine) -> bool:
        if scripted._runner is None:
            return True
        return scripted.probes > 0 and self.engine(scripted).is_up == scripted.is_healthy

    async def assert_nothing_is_held(self) -> None:
        await eventually(lambda: self.server._admission.running == 0)
        assert self.server._admission.queued == 0
        assert self.server._admission.held_bytes == 0
        assert [(one.running, one.tokens) for one in self.server._engines] == [
            (0, 0) for _ in self.server._engines
        ]


def make_config(
    prefill: Sequence[ScriptedEngine], decode: Sequence[ScriptedEngine], **settings: Any
) -> ProxyConfig:
    is_p2p = settings.get("protocol") == "p2p"
    own = {
        "listen": "127.0.0.1:0",
        "prefill": [one.url + "?p2p=10.0.0.1:7777" * is_p2p for one in prefill],
        "decode": [one.url for one in decode],
    }
    return apply(ProxyConfig(), {**FAST, **own, **settings}, source="test")


@asynccontextmanager
async def running_proxy(
    prefill: Sequence[ScriptedEngine], decode: Sequence[ScriptedEngine], **settings: Any
) -> AsyncIterator[RunningProxy]:
    """The proxy has probed its engines."""
    server = ProxyServer(make_config(prefill, decode, **settings))
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(on_ready=lambda _: ready.set()))
    await asyncio.wait(
        [serving, asyncio.ensure_future(ready.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    if serving.done():
        serving.result()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENT_S)) as client:
        proxy = RunningProxy(server, client)
        try:
            for scripted in (*prefill, *decode):
                await eventually(lambda one=scripted: proxy.has_probed(one))  # type: ignore[misc]
            yield proxy
        finally:
            server.stop()
            server.stop()
            await serving


@asynccontextmanager
async def engines_and_proxy(
    num_prefill: int, num_decode: int, **settings: Any
) -> AsyncIterator[tuple[list[ScriptedEngine], list[ScriptedEngine], RunningProxy]]:
    async with AsyncExitStack() as stack:
        prefill = [ScriptedEngine(f"prefill {n}") for n in range(num_prefill)]
        decode = [ScriptedEngine(f"decode {n}") for n in range(num_decode)]
        for engine in (*prefill, *decode):
            await stack.enter_async_context(engine)
        proxy = await stack.enter_async_context(running_proxy(prefill, decode, **settings))
        yield prefill, decode, proxy


async def eventually(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < until, f"not within {PATIENT_S:g} s"
        await asyncio.sleep(0.005)
