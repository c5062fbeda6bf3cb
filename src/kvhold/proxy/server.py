"""The proxy's process: `kvhold proxy`.

SIGTERM lets running requests end; a second signal ends the process.
"""

import asyncio
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvhold.core.errors import UNDECODABLE, ConfigError
from kvhold.core.proxy_config import ProxyConfig
from kvhold.core.secrets import read_secret
from kvhold.net.addresses import is_loopback, split_address
from kvhold.net.pages import PAGE_HEADERS, read_pages
from kvhold.net.tls import server_context
from kvhold.proxy.admission import Admission
from kvhold.proxy.calls import EngineCalls
from kvhold.proxy.engines import ProxiedEngine, make_pools
from kvhold.proxy.forwarding import Forwarder
from kvhold.proxy.front import Front, ProxyExchange, ProxyKeys
from kvhold.proxy.headers import Headers
from kvhold.proxy.health import HealthProber
from kvhold.proxy.metrics import ProxyMetrics
from kvhold.proxy.pages import FILES
from kvhold.proxy.refusals import ProxyRefusal

log = logging.getLogger(__name__)

_IDLE_CONNECTION_S = 75.0
_LINGER_S = 2.0
_MOST_COMMAND_BYTES = 4 << 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _EngineCommand(msgspec.Struct):
    engine: str


class _QuietHttp(logging.Filter):
    """aiohttp's errors quote requests, which may hold keys."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        return log.isEnabledFor(logging.DEBUG)


class ProxyServer:
    def __init__(self, config: ProxyConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self.host, self.port = split_address(config.listen, "proxy.listen")
        self._prefill, self._decode = make_pools(config)
        self._engines = (*self._prefill.engines, *self._decode.engines)
        self._tls = _tls_of(config)
        self._keys = _keys_of(config, self.host, self._tls)
        self._metrics = ProxyMetrics()
        self._admission = Admission(config, lambda: self._decode.num_usable)
        self._metrics.watch(self._engines, self._admission)
        self._front: Front | None = None
        self._stopping = asyncio.Event()
        self._ending = asyncio.Event()

    async def serve(self, on_ready: Callable[["ProxyServer"], None] | None = None) -> None:
        """Raises ConfigError: cannot listen."""
        calls = EngineCalls(self._config)
        headers: Headers = []
        if self._keys.of_engines:
            headers = [("Authorization", f"Bearer {self._keys.of_engines}")]
        prober = HealthProber(
            self._engines,
            lambda engine: calls.probe(engine, headers),
            self._config,
            self._admission.wake,
        )
        forwarder = Forwarder(
            self._config,
            self._prefill,
            self._decode,
            calls=calls,
            prober=prober,
            metrics=self._metrics,
        )
        self._front = Front(
            self._config,
            keys=self._keys,
            admission=self._admission,
            forwarder=forwarder,
            metrics=self._metrics,
        )
        runner = self._make_runner(self._front)
        loop = asyncio.get_running_loop()
        try:
            await runner.setup()
            await self._listen(runner)
            prober.start()
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.stop)
            if on_ready is not None:
                on_ready(self)
            await self._stopping.wait()
            await self._drain(self._front)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            await runner.cleanup()
            await prober.close()
            await calls.close()

    def stop(self) -> None:
        """Let running requests end; the second time, do not."""
        if self._stopping.is_set():
            self._ending.set()
        self._stopping.set()

    async def _drain(self, front: Front) -> None:
        front.is_draining = True
        waits = [
            asyncio.ensure_future(front.wait_until_idle()),
            asyncio.ensure_future(self._ending.wait()),
        ]
        try:
            await asyncio.wait(
                waits, timeout=self._config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
        left = self._admission.running
        if left:
            log.warning("%d requests are ended before their answer", left)

    def _make_runner(self, front: Front) -> web.AppRunner:
        app = web.Application()
        app.on_response_prepare.append(_name_server)
        app.router.add_get("/health", self._ready)
        app.router.add_get("/health/ready", self._ready)
        app.router.add_get("/health/live", self._live)
        app.router.add_get("/metrics", self._guarded(self._show_metrics, self._keys.check_client))
        check_admin = self._keys.check_admin
        app.router.add_get("/proxy/engines", self._guarded(self._show_engines, check_admin))
        app.router.add_post("/proxy/drain", self._guarded(self._drain_engine, check_admin))
        app.router.add_post("/proxy/resume", self._guarded(self._resume_engine, check_admin))
        if self._config.chat:
            pages = read_pages("kvhold.proxy.pages", FILES)
            for path, (content_type, content) in pages.items():
                app.router.add_get(path, _page(content_type, content))
        app.router.add_route("*", "/{path:.*}", front.handle)
        http_log = logging.getLogger(f"{__name__}.http")
        http_log.addFilter(_QuietHttp())
        return web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves ends its request
            auto_decompress=False,
            access_log=None,
            logger=http_log,
            max_line_size=self._config.max_header_bytes,
            max_field_size=self._config.max_header_bytes,
            keepalive_timeout=_IDLE_CONNECTION_S,
            lingering_time=_LINGER_S,
            shutdown_timeout=0.1,
        )

    async def _listen(self, runner: web.AppRunner) -> None:
        try:
            site = web.TCPSite(
                runner, self.host, self.port, ssl_context=self._tls, reuse_address=True
            )
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"proxy.listen: cannot listen on {self._config.listen}: {error.strerror or error}"
            ) from None
        self.port = runner.addresses[0][1]

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _ready(self, request: web.Request) -> web.Response:
        assert self._front is not None
        usable = self._decode.num_usable
        status = (
            "draining" if self._front.is_draining else "ready" if usable else "no decode engine"
        )
        content = {
            "status": status,
            "prefill": {"usable": self._prefill.num_usable, "all": len(self._prefill.engines)},
            "decode": {"usable": usable, "all": len(self._decode.engines)},
        }
        return web.json_response(content, status=200 if status == "ready" else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _show_engines(self, request: web.Request) -> web.Response:
        return web.json_response({"engines": [_describe(engine) for engine in self._engines]})

    async def _drain_engine(self, request: web.Request) -> web.Response:
        return await self._set_draining(request, True)

    async def _resume_engine(self, request: web.Request) -> web.Response:
        return await self._set_draining(request, False)

    async def _set_draining(self, request: web.Request, is_draining: bool) -> web.Response:
        body = b""
        while piece := await request.content.readany():
            body += piece
            if len(body) > _MOST_COMMAND_BYTES:
                raise ProxyRefusal(413, "too_large", "the command is too large")
        try:
            url = msgspec.json.decode(body, type=_EngineCommand).engine.rstrip("/")
        except (msgspec.ValidationError, *UNDECODABLE):
            raise ProxyRefusal(400, "bad_request", 'send {"engine": "URL"}') from None
        found = [engine for engine in self._engines if url in (engine.url, engine.name)]
        if not found:
            raise ProxyRefusal(404, "bad_request", "no engine of this proxy has this URL")
        for engine in found:
            engine.is_draining = is_draining
            log.info(
                "%s engine %s: %s", engine.role, engine.name, "drains" if is_draining else "resumes"
            )
        self._admission.wake()
        return web.json_response({"engines": [_describe(engine) for engine in found]})

    def _guarded(
        self,
        handler: Callable[[web.Request], Awaitable[web.Response]],
        check: Callable[[web.Request], None],
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                check(request)
                return await handler(request)
            except ProxyRefusal as refusal:
                return ProxyExchange(request, self._config, self._metrics).refusal(refusal)

        return handle


def _page(
    content_type: str, content: bytes
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def show(request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=content, content_type=content_type, charset="utf-8", headers=PAGE_HEADERS
        )

    return show


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "kvhold"


def _describe(engine: ProxiedEngine) -> Mapping[str, Any]:
    return {
        "role": engine.role,
        "url": engine.url,
        "usable": engine.is_usable,
        "draining": engine.is_draining,
        "cause": engine.cause,
        "running": engine.running,
        "tokens": engine.tokens,
    }


def _keys_of(config: ProxyConfig, host: str, tls: ssl.SSLContext | None) -> ProxyKeys:
    """Raises ConfigError: an address that may not be exposed."""
    key = config.api_key
    if not key and config.api_key_file:
        key = read_secret(config.api_key_file, where="proxy.api_key_file")
    is_local = is_loopback(host)
    if not is_local and not key:
        raise ConfigError(
            f"proxy.listen = {config.listen!r}: only the loopback interface is served without a "
            "key; set proxy.api_key_file"
        )
    if not is_local and tls is None:
        log.warning(
            "proxy.listen = %r: without proxy.tls_cert, others on the network can read keys, "
            "prompts and answers",
            config.listen,
        )
    admin = engines = ""
    if config.admin_key_file:
        admin = read_secret(config.admin_key_file, where="proxy.admin_key_file")
    if config.engine_api_key_file:
        engines = read_secret(config.engine_api_key_file, where="proxy.engine_api_key_file")
    return ProxyKeys(key, admin, engines, is_local=is_local)


def _tls_of(config: ProxyConfig) -> ssl.SSLContext | None:
    if not config.tls_cert:
        if config.tls_key:
            raise ConfigError("proxy.tls_key needs proxy.tls_cert")
        return None
    try:
        return server_context(config.tls_cert, config.tls_key, "")
    except ConfigError as error:
        raise ConfigError(f"proxy.tls_cert: {error}") from None
