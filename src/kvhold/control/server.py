"""The API's process: `kvhold control`. One event loop."""

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from kvhold.control.access import Access, Caller, ControlRole, ForTenants
from kvhold.control.api import ControlApi
from kvhold.control.exposition import CONTENT_TYPE, render, render_absent
from kvhold.control.node import ControlledNode
from kvhold.control.openapi import document
from kvhold.control.pages import FILES
from kvhold.control.recorder import Recorder, state_and_samples
from kvhold.control.refusals import ControlRefusal
from kvhold.control.route import Route
from kvhold.control.routes import ROUTES
from kvhold.control.tenants import TenantApi, never
from kvhold.control.tokenizing import PromptTokenizers
from kvhold.core.config import Config
from kvhold.core.control_config import ControlConfig
from kvhold.core.errors import UNDECODABLE, ConfigError
from kvhold.core.otel_config import OtelConfig
from kvhold.net.addresses import is_loopback, split_address
from kvhold.net.pages import PAGE_HEADERS, read_pages
from kvhold.net.tls import server_context
from kvhold.node.otel import not_installed
from kvhold.node.paths import control_path, history_path, socket_path
from kvhold.node.socket_lock import SocketLock, bind_own

if TYPE_CHECKING:
    from kvhold.control.otlp import MetricsExport

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BODY_S = 10.0
_MOST_HEADER_BYTES = 8 << 10
_BACKLOG = 128

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlServer:
    def __init__(self, config: Config) -> None:
        """Raises ConfigError, NodeError."""
        self._config = config.control
        self.host, self.port = "", 0
        if self._config.listen:
            self.host, self.port = split_address(self._config.listen, "control.listen")
        self._access = Access(self._config, self.host)
        self._tls = _tls_of(self._config)
        node_path = socket_path(config.node.socket)
        self.path = control_path(self._config.socket, node_path)
        timeout_s = self._config.node_timeout_s
        self._node = ControlledNode(
            node_path,
            replace(
                config.client,
                call_timeout_s=timeout_s,
                arrival_timeout_s=timeout_s,
                check_memory=True,  # for checksums
            ),
            self._config.max_running,
        )
        self._recorder: Recorder | None = None
        if self._config.history_interval_s:
            self._recorder = Recorder(
                self._node,
                Path(self._config.history_file).expanduser().absolute()
                if self._config.history_file
                else history_path(node_path),
                self._config.history_interval_s,
            )
        self._export = _export_of(config.otel, self._node)
        self._tokenizers = PromptTokenizers(self._config.tokenizers)
        self._api = ControlApi(
            self._node, self._recorder, self._tokenizers, self._config.max_pinned_bytes
        )
        self._document = msgspec.json.encode(document())
        self._stopping = asyncio.Event()

    async def serve(self, on_ready: Callable[["ControlServer"], None] | None = None) -> None:
        """Raises ConfigError, NodeError: cannot listen."""
        runner = web.AppRunner(
            self._make_app(),
            access_log=None,
            auto_decompress=False,
            max_line_size=_MOST_HEADER_BYTES,
            max_field_size=_MOST_HEADER_BYTES,
        )
        loop = asyncio.get_running_loop()
        with ExitStack() as cleanup:
            lock = SocketLock(self.path, setting="control.socket", what="an API")
            cleanup.callback(lock.close)
            try:
                await runner.setup()
                if self._recorder is not None:
                    self._recorder.start()
                own = bind_own(self.path, setting="control.socket")
                cleanup.callback(self.path.unlink, missing_ok=True)
                await web.SockSite(runner, own, backlog=_BACKLOG).start()
                await self._listen(runner)
                if self._export is not None:
                    self._export.start()
                for number in _SIGNALS:
                    loop.add_signal_handler(number, self.stop)
                if on_ready is not None:
                    on_ready(self)
                await self._stopping.wait()
            finally:
                for number in _SIGNALS:
                    loop.remove_signal_handler(number)
                await runner.cleanup()
                if self._recorder is not None:
                    await self._recorder.close()
                if self._export is not None:
                    await self._export.close()
                self._tokenizers.close()
                await self._node.close()

    def stop(self) -> None:
        self._stopping.set()

    async def _listen(self, runner: web.AppRunner) -> None:
        if not self._config.listen:
            return
        try:
            site = web.TCPSite(
                runner, self.host, self.port, ssl_context=self._tls, reuse_address=True
            )
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"control.listen: cannot listen on {self._config.listen}: {error.strerror or error}"
            ) from None
        self.port = next(address[1] for address in runner.addresses if isinstance(address, tuple))

    def _make_app(self) -> web.Application:
        app = web.Application(client_max_size=self._config.max_body_bytes)
        app.on_response_prepare.append(_add_headers)
        app.router.add_get("/openapi.json", self._show_document)
        for path, (content_type, content) in read_pages("kvhold.control.pages", FILES).items():
            app.router.add_get(path, _page(content_type, content))
        app.router.add_get("/metrics", self._guarded(self._show_metrics))
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._guarded(self._handler(route)))
        app.router.add_route("*", "/{path:.*}", self._guarded(self._no_path))
        return app

    def _guarded(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except ControlRefusal as refusal:
                return _refuse(refusal)
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("%s %s failed", request.method, request.path)
                return _refuse(
                    ControlRefusal(HTTPStatus.INTERNAL_SERVER_ERROR, "bug", "the API failed")
                )

        return handle

    def _handler(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            caller = self._caller_of(request)
            _check_role(caller.role, route.role)
            if caller.tenant and route.tenants is ForTenants.NEVER:
                raise never()
            arguments: list[Any] = []
            if route.body is not None:
                body = _decode(await self._read(request), route)
                _check_role(caller.role, route.role_for(body))
                arguments.append(body)
            named = _path_values(request) | _query_values(request, route)
            api = TenantApi(self._api, caller.tenant) if caller.tenant else self._api
            answer = await route.run(api, *arguments, **named)
            return web.Response(
                body=msgspec.json.encode(answer),
                status=route.status,
                content_type="application/json",
            )

        return handle

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        caller = self._caller_of(request)
        _check_role(caller.role, ControlRole.READ)
        if caller.tenant:
            raise never()
        try:
            status, samples = await self._node.call(state_and_samples)
            body = render(status, samples)
        except ControlRefusal as refusal:
            log.debug("metrics: %s", refusal)
            body = render_absent()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _show_document(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._document, content_type="application/json")

    async def _no_path(self, request: web.Request) -> web.StreamResponse:
        if request.path in {"/metrics", *(route.path for route in ROUTES)}:
            raise ControlRefusal(
                HTTPStatus.METHOD_NOT_ALLOWED, "method", f"not with {request.method}"
            )
        raise ControlRefusal(
            HTTPStatus.NOT_FOUND, "no_path", "there is no such path; see /openapi.json"
        )

    async def _read(self, request: web.Request) -> bytes:
        most = self._config.max_body_bytes
        try:
            async with asyncio.timeout(_BODY_S):
                body: bytes = await request.read()
                return body
        except web.HTTPRequestEntityTooLarge:
            raise ControlRefusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "too_large",
                f"the request is larger than {most} bytes (control.max_body_bytes)",
            ) from None
        except TimeoutError:
            raise ControlRefusal(
                HTTPStatus.REQUEST_TIMEOUT, "slow_client", "the request did not arrive in time"
            ) from None

    def _caller_of(self, request: web.Request) -> Caller:
        """Raises ControlRefusal: another site's page asks."""
        assert request.transport is not None
        if request.transport.get_extra_info("socket").family == socket.AF_UNIX:
            return Caller(ControlRole.ADMINISTER)
        authorization = request.headers.get("Authorization", "")
        if not authorization and self._access.needs_host_check:
            self._check_host(request)
        return self._access.caller_on_tcp(authorization)

    def _check_host(self, request: web.Request) -> None:
        host = request.host.rpartition(":")[0] or request.host
        host = host.strip("[]")
        if host != self.host and not is_loopback(host):
            raise ControlRefusal(
                HTTPStatus.FORBIDDEN,
                "host",
                "without a token, the host in the URL must be an address of the loopback interface",
            )


def _check_role(role: ControlRole, needed: ControlRole) -> None:
    if role >= needed:
        return
    if role is ControlRole.NONE:
        raise ControlRefusal(
            HTTPStatus.UNAUTHORIZED, "no_token", "a token is needed, and it must be a known one"
        )
    raise ControlRefusal(
        HTTPStatus.FORBIDDEN,
        "role",
        f"this needs the role {needed.name.lower()}, and the token's is {role.name.lower()}; "
        "or use the API's Unix socket",
    )


def _decode(body: bytes, route: Route) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=route.body)
    except (msgspec.ValidationError, *UNDECODABLE) as error:
        raise ControlRefusal(
            HTTPStatus.BAD_REQUEST, "bad_request", f"the body: {str(error)[:200]}"
        ) from None


def _path_values(request: web.Request) -> dict[str, Any]:
    values: dict[str, Any] = dict(request.match_info)
    if "number" in values:
        digits = values["number"]
        if not digits.isascii() or not digits.isdigit() or len(digits) > 10:
            raise ControlRefusal(
                HTTPStatus.BAD_REQUEST, "bad_request", f"{digits[:16]!r} is not a number"
            )
        values["number"] = int(digits)
    return values


def _query_values(request: web.Request, route: Route) -> dict[str, str]:
    unknown = sorted(set(request.query) - set(route.query))
    if unknown:
        known = ", ".join(route.query) or "none"
        raise ControlRefusal(
            HTTPStatus.BAD_REQUEST,
            "bad_request",
            f"there is no parameter {unknown[0][:32]!r}; known: {known}",
        )
    return {name: request.query[name] for name in request.query}


def _refuse(refusal: ControlRefusal) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == HTTPStatus.UNAUTHORIZED else {}
    response = web.Response(
        status=refusal.status,
        body=msgspec.json.encode(refusal.problem()),
        headers=headers,
        content_type="application/problem+json",
    )
    if refusal.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        response.force_close()  # the rest of the body is not read
    return response


def _page(content_type: str, content: bytes) -> Handler:
    async def show(request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=content,
            content_type=content_type,
            charset="utf-8",
            headers=PAGE_HEADERS,
        )

    return show


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "kvhold"
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"


def _export_of(config: OtelConfig, node: ControlledNode) -> "MetricsExport | None":
    if not config.endpoint or not config.metrics_interval_s:
        return None
    try:
        from kvhold.control.otlp import MetricsExport
    except ImportError as error:
        raise not_installed(error) from None
    return MetricsExport(node, config)


def _tls_of(config: ControlConfig) -> ssl.SSLContext | None:
    if not config.tls_cert:
        if config.tls_key or config.tls_client_ca:
            raise ConfigError("control.tls_key and control.tls_client_ca need control.tls_cert")
        return None
    try:
        return server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
    except ConfigError as error:
        raise ConfigError(f"control.tls_cert: {error}") from None
