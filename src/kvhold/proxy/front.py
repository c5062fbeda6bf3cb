"""Check and read a client's request, wait for a place, and pass the engine's answer.

When the client leaves, its requests to engines end.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable
from hashlib import blake2b

from aiohttp import web
from multidict import CIMultiDict

from kvhold.core.proxy_config import ProxyConfig
from kvhold.proxy.admission import Admission, HeldBytes, ProxyOverloaded
from kvhold.proxy.cache_fields import RESPONSES, BadCacheSetting, read_cache_settings
from kvhold.proxy.cache_usage import UsageRewriter
from kvhold.proxy.calls import EngineAnswer
from kvhold.proxy.faults import EngineFault
from kvhold.proxy.forwarding import Forwarder, NoEngineAnswers, ProxiedRequest
from kvhold.proxy.headers import (
    REQUEST_ID,
    answer_headers,
    client_key,
    request_headers,
    request_id_of,
)
from kvhold.proxy.metrics import ProxyMetrics
from kvhold.proxy.prompts import KINDS, NotAnInference, read_fields, read_inference, session_of
from kvhold.proxy.refusals import ProxyRefusal, error_event

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_MOST_SESSION = 256
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_OF_ONE_ENGINE = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class SlowClient(Exception): ...


class Front:
    def __init__(
        self,
        config: ProxyConfig,
        *,
        keys: "ProxyKeys",
        admission: Admission,
        forwarder: Forwarder,
        metrics: ProxyMetrics,
    ) -> None:
        self._config = config
        self._keys = keys
        self._admission = admission
        self._forwarder = forwarder
        self._metrics = metrics
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        exchange = ProxyExchange(request, self._config, self._metrics)
        self._active += 1
        self._idle.clear()
        status = 499
        try:
            response = await self._answer(exchange)
            status = response.status
            return response
        except ProxyRefusal as refusal:
            status = refusal.status
            return self.refuse(exchange, refusal)
        except asyncio.CancelledError:
            self._metrics.clients_left.labels(exchange.stage).inc()
            raise
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            status = 500
            return self.refuse(exchange, ProxyRefusal(500, "bug", "the proxy failed"))
        finally:
            self._metrics.requests.labels(exchange.kind, str(status)).inc()
            self._active -= 1
            if not self._active:
                self._idle.set()

    def refuse(self, exchange: "ProxyExchange", refusal: ProxyRefusal) -> web.StreamResponse:
        log.debug("request %s: refused (%s): %s", exchange.request_id, refusal.status, refusal)
        self._metrics.refused.labels(refusal.reason).inc()
        if exchange.response is not None:
            exchange.cut()
            return exchange.response
        return exchange.refusal(refusal)

    async def _answer(self, exchange: "ProxyExchange") -> web.StreamResponse:
        self._check(exchange)
        try:
            self._admission.check_queue()
            with self._admission.hold() as held:
                request = await self._read(exchange, held)
                exchange.proxied = request
                began = time.monotonic()
                async with self._admission.slot():
                    self._metrics.queue_seconds.observe(time.monotonic() - began)
                    await self._forwarder.forward(request, exchange.deliver)
        except ProxyOverloaded as error:
            raise ProxyRefusal(
                503, error.reason, str(error), retry_after_s=_RETRY_AFTER_S
            ) from None
        except NoEngineAnswers as error:
            if error.is_late:
                raise ProxyRefusal(504, "no_answer", str(error)) from None
            raise ProxyRefusal(
                503, "no_answer", str(error), retry_after_s=self._config.probe_interval_s
            ) from None
        assert exchange.response is not None
        return exchange.response

    def _check(self, exchange: "ProxyExchange") -> None:
        request = exchange.request
        if self.is_draining:
            raise ProxyRefusal(
                503, "draining", "the proxy is shutting down", retry_after_s=_RETRY_AFTER_S
            )
        self._keys.check_client(request)
        if request.method not in _METHODS:
            raise ProxyRefusal(
                405, "bad_request", f"the method must be one of {', '.join(_METHODS)}"
            )
        path = request.path
        is_served = any(
            path.startswith(served) if served.endswith("/") else path == served
            for served in self._config.paths
        )
        if not is_served or path in _OF_ONE_ENGINE or {".", ".."} & set(path.split("/")):
            raise ProxyRefusal(404, "no_path", "this proxy does not serve the path (proxy.paths)")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ProxyRefusal(415, "bad_request", "compressed requests are not accepted")

    async def _read(self, exchange: "ProxyExchange", held: HeldBytes) -> ProxiedRequest:
        request = exchange.request
        body = await self._read_body(request, held)
        path = request.path
        proxied = ProxiedRequest(
            exchange.request_id,
            request.method,
            request.rel_url.raw_path_qs,
            request_headers(request.headers.items(), exchange.request_id, self._keys.of_engines),
            body,
            session=request.headers.get(self._config.session_header, "")[:_MOST_SESSION] or None,
        )
        is_inference = request.method == "POST" and path in KINDS
        if not is_inference and (not body or request.content_type == "multipart/form-data"):
            return proxied
        try:
            fields, proxied.body = read_fields(body)
            if is_inference:
                proxied.inference = read_inference(path, fields)
            session = session_of(fields)
            if self._config.cache_settings and (is_inference or path == RESPONSES):
                proxied.kept = read_cache_settings(path, fields)
        except NotAnInference as error:
            raise ProxyRefusal(400, "bad_request", str(error)) from None
        except BadCacheSetting as error:
            raise ProxyRefusal(400, "bad_request", str(error), field=error.field) from None
        proxied.fields = fields
        proxied.session = proxied.session or session
        return proxied

    async def _read_body(self, request: web.Request, held: HeldBytes) -> bytes:
        most = self._config.max_body_bytes
        too_large = ProxyRefusal(
            413, "too_large", f"the request is larger than {most} bytes (proxy.max_body_bytes)"
        )
        if (request.content_length or 0) > most:
            raise too_large
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._config.client_timeout_s):
                while piece := await request.content.readany():
                    num_bytes += len(piece)
                    if num_bytes > most:
                        raise too_large
                    held.add(len(piece))
                    parts.append(piece)
        except TimeoutError:
            raise ProxyRefusal(
                408, "slow_client", "the request did not arrive in time (proxy.client_timeout_s)"
            ) from None
        except web.RequestPayloadError as error:
            raise ProxyRefusal(400, "bad_request", f"the body cannot be read: {error}") from None
        return b"".join(parts)


class ProxyExchange:
    def __init__(self, request: web.Request, config: ProxyConfig, metrics: ProxyMetrics) -> None:
        self.request = request
        self.request_id = request_id_of(request.headers)
        self.kind = KINDS.get(request.path, "other") if request.method == "POST" else "other"
        self.proxied: ProxiedRequest | None = None
        self.response: web.StreamResponse | None = None
        self._config = config
        self._metrics = metrics
        self._began = time.monotonic()

    @property
    def stage(self) -> str:
        return "before" if self.proxied is None else self.proxied.stage

    async def deliver(self, answer: EngineAnswer) -> None:
        response = web.StreamResponse(
            status=answer.status,
            headers=CIMultiDict(answer_headers(answer.headers, self.request_id)),
        )
        pieces = answer.pieces()
        if (rewriter := self._usage_rewriter(answer)) is None:
            response.content_length = answer.content_length
        else:
            pieces = rewriter.events(pieces) if answer.is_event_stream else rewriter.whole(pieces)
        self._metrics.first_byte_seconds.observe(time.monotonic() - self._began)
        self.response = response
        last = b""
        try:
            await self._send(response.prepare(self.request))
            async for piece in pieces:
                await self._send(response.write(piece))
                last = (last + piece)[-2:]
            await self._send(response.write_eof())
        except EngineFault as fault:
            log.info("request %s: the answer is cut: %s", self.request_id, fault)
            self._metrics.cut.inc()
            # not in the middle of an event
            if answer.is_event_stream and last in (b"", b"\n\n"):
                await self._send_last(response, f"the engine failed: {fault}")
            self.cut()
        except SlowClient:
            log.debug("request %s: the client does not read its answer", self.request_id)
            self._metrics.refused.labels("slow_client").inc()
            if self.request.transport is not None:
                self.request.transport.abort()
        except ConnectionError:
            self._metrics.clients_left.labels(self.stage).inc()

    def _usage_rewriter(self, answer: EngineAnswer) -> UsageRewriter | None:
        request = self.proxied
        if (
            request is None
            or request.inference is None
            or answer.status != 200
            or not self._config.cache_settings
        ):
            return None
        inference = request.inference
        rewriter = UsageRewriter(inference.kind, inference.num_prompts, request.usage)
        return rewriter if rewriter.is_needed else None

    def cut(self) -> None:
        """Close without an end of the answer."""
        if self.request.transport is not None:
            self.request.transport.close()

    def refusal(self, refusal: ProxyRefusal) -> web.Response:
        headers = {REQUEST_ID: self.request_id}
        if refusal.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(refusal.retry_after_s)))
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        response = web.Response(
            status=refusal.status,
            body=b"" if self.request.method == "HEAD" else refusal.body(self.request.path),
            headers=headers,
            content_type="application/json",
        )
        if refusal.status in (408, 413, 503):  # the rest of the body is not read
            response.force_close()
        return response

    async def _send_last(self, response: web.StreamResponse, message: str) -> None:
        try:
            await self._send(response.write(error_event(self.request.path, message)))
        except (ConnectionError, SlowClient):
            log.debug("request %s: the client has left", self.request_id)

    async def _send(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._config.client_timeout_s):
                await sending
        except TimeoutError:
            raise SlowClient from None


class ProxyKeys:
    """They are in no log."""

    def __init__(self, client: str, admin: str, engines: str, *, is_local: bool) -> None:
        """is_local: the proxy listens on loopback only"""
        self._client = _digest(client) if client else b""
        self._admin = _digest(admin) if admin else b""
        self._is_local = is_local
        self.of_engines = engines

    def check_client(self, request: web.Request) -> None:
        """Raises ProxyRefusal."""
        if self._client and not _is_same(request, self._client):
            raise ProxyRefusal(401, "no_key", "an API key is needed, and this one is not it")

    def check_admin(self, request: web.Request) -> None:
        """Raises ProxyRefusal."""
        if self._admin:
            if not _is_same(request, self._admin):
                raise ProxyRefusal(401, "no_key", "the administrator's key is needed")
        elif not self._is_local:
            raise ProxyRefusal(
                403, "no_key", "beyond loopback, this needs a key (proxy.admin_key_file)"
            )
        else:
            self.check_client(request)


def _is_same(request: web.Request, digest: bytes) -> bool:
    return hmac.compare_digest(_digest(client_key(request.headers)), digest)


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogateescape")).digest()
