"""Send one request to a prefill and a decode engine.

Each part is tried on other engines until its first byte has arrived. Cancelling `forward` closes
both connections.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kvhold.core.errors import KVHoldError
from kvhold.core.proxy_config import ProxyConfig
from kvhold.proxy.answered import AnsweredPrompts
from kvhold.proxy.cache_fields import KeptPrefix
from kvhold.proxy.cache_retains import BreakpointPlaces
from kvhold.proxy.cache_usage import PromptUsage, cached_tokens_of
from kvhold.proxy.calls import EngineAnswer, EngineCall, EngineCalls
from kvhold.proxy.engines import EnginePool, ProxiedEngine
from kvhold.proxy.faults import EngineFault
from kvhold.proxy.handovers import HandoverFailed, Params, make_handover, new_handover_id
from kvhold.proxy.headers import Headers, prefill_headers
from kvhold.proxy.health import HealthProber
from kvhold.proxy.metrics import ProxyMetrics
from kvhold.proxy.prompts import Fields, Inference, encode_fields, with_hints

log = logging.getLogger(__name__)

Deliver = Callable[[EngineAnswer], Awaitable[None]]

_RETRIED = frozenset({429, 500, 502, 503, 504})
_MOST_PREFILL_BYTES = 16 << 20
_PAUSE_S = 0.05


class NoEngineAnswers(KVHoldError):
    def __init__(self, detail: str, *, is_late: bool = False) -> None:
        super().__init__(detail)
        self.is_late = is_late


@dataclass
class ProxiedRequest:
    """inference: None: a request that is not for tokens
    fields:    of the body, if it is a JSON object
    kept:      prefixes that the client wants kept
    stage:     for metrics: before, prefill, decode
    """

    request_id: str
    method: str
    path: str
    headers: Headers
    body: bytes
    inference: Inference | None = None
    session: str | None = None
    fields: Fields = field(default_factory=dict)
    kept: Sequence[KeptPrefix] = ()
    usage: PromptUsage = field(default_factory=PromptUsage)
    stage: str = field(default="before")

    @property
    def may_repeat(self) -> bool:
        """Whether two engines may get it."""
        return self.inference is not None or self.method in ("GET", "HEAD")

    @property
    def tokens(self) -> int:
        return 0 if self.inference is None else self.inference.likely_tokens


@dataclass
class _Handed:
    """The prefill's result. running: the prefill, if the decode engine need not wait for its end"""

    params: Params = field(default_factory=dict)
    running: "asyncio.Task[Params | None] | None" = None

    def lose(self) -> None:
        self.params = {}
        if self.running is not None:
            self.running.cancel()
            self.running = None


class Forwarder:
    def __init__(
        self,
        config: ProxyConfig,
        prefill: EnginePool,
        decode: EnginePool,
        *,
        calls: EngineCalls,
        prober: HealthProber,
        metrics: ProxyMetrics,
    ) -> None:
        self._config = config
        self._prefill_pool = prefill
        self._decode_pool = decode
        self._calls = calls
        self._prober = prober
        self._metrics = metrics
        self._handover = make_handover(config.protocol)
        self._breakpoints = BreakpointPlaces(calls)
        self._answered = AnsweredPrompts(config.skip_answered_s)

    async def forward(self, request: ProxiedRequest, deliver: Deliver) -> None:
        """Raises NoEngineAnswers before `deliver` is called, and the errors of `deliver`."""
        if request.kept:
            await self._ask_to_keep(request)
        handed = _Handed()
        reason = self._reason_against_prefill(request.inference)
        if reason and request.inference is not None:
            self._metrics.prefills.labels(reason).inc()
        try:
            if not reason:
                handed = await self._begin_handover(request)
            request.stage = "decode"
            await self._decode(request, handed, deliver)
        finally:
            if handed.running is not None:
                await _end(handed.running)

    async def _ask_to_keep(self, request: ProxiedRequest) -> None:
        """Add retains to the request, for the prefixes whose length is known."""
        placed = await self._breakpoints.place(
            request.kept, lambda: self._decode_pool.choose(request.session), request.headers
        )
        request.usage.placed = placed
        self._metrics.retains.labels("asked").inc(len(placed))
        self._metrics.retains.labels("unplaced").inc(len(request.kept) - len(placed))
        hints = [one.hint for one in placed]
        if request.inference is not None:
            request.inference = request.inference.with_hints(hints)
            request.body = request.inference.with_params({})
        else:
            request.body = encode_fields(with_hints(request.fields, hints))

    def _reason_against_prefill(self, inference: Inference | None) -> str:
        if inference is None or not self._prefill_pool.engines:
            return "no_engine"
        if not inference.has_prefill or (self._handover.is_for_one and not inference.is_single):
            return "unsupported"
        most = inference.most_tokens
        if most is not None and most < self._config.min_prefill_tokens:
            return "short"
        new = self._answered.new_tokens(inference)
        if new is not None and new < self._config.min_prefill_tokens:
            return "hit"
        return "" if self._prefill_pool.num_usable else "no_engine"

    async def _begin_handover(self, request: ProxiedRequest) -> _Handed:
        request.stage = "prefill"
        if not self._handover.is_parallel:
            return _Handed(await self._prefill(request) or {})
        engine = self._prefill_pool.choose(request.session)
        if engine is None:
            self._metrics.prefills.labels("no_engine").inc()
            return _Handed()
        name = new_handover_id()
        params = self._handover.decode_params(engine, name, b"")
        running = asyncio.create_task(self._prefill(request, only=engine, name=name))
        return _Handed(params, running)

    async def _prefill(
        self, request: ProxiedRequest, *, only: ProxiedEngine | None = None, name: str = ""
    ) -> Params | None:
        """Return parameters for the decode engine; None: failed."""
        began = time.monotonic()
        result = "abandoned"
        request.usage.has_prefill = True
        try:
            async with asyncio.timeout(self._config.prefill_timeout_s):
                params = await self._try_prefill_engines(request, only, name)
            result = "failed" if params is None else "done"
        except TimeoutError:
            log.debug("request %s: no prefill in time", request.request_id)
            params, result = None, "failed"
        finally:
            self._metrics.prefills.labels(result).inc()
            request.usage.has_prefill = result == "done"
            request.usage.prefill_ended.set()
        if params is not None:
            self._metrics.prefill_seconds.observe(time.monotonic() - began)
        return params

    async def _try_prefill_engines(
        self, request: ProxiedRequest, only: ProxiedEngine | None, name: str
    ) -> Params | None:
        tried: list[ProxiedEngine] = []
        for attempt in range(1 if only else self._config.max_attempts):
            engine = only or self._prefill_pool.choose(request.session, tried)
            if engine is None:
                break
            if attempt:
                self._metrics.retries.labels("prefill").inc()
            tried.append(engine)
            try:
                with engine.busy(request.tokens):
                    return await self._prefill_at(engine, request, name or new_handover_id())
            except EngineFault as fault:
                self._note(engine, request, fault)
            except HandoverFailed as error:
                log.debug(
                    "request %s: %s hands nothing over: %s", request.request_id, engine.name, error
                )
                break
        return None

    async def _prefill_at(
        self, engine: ProxiedEngine, request: ProxiedRequest, name: str
    ) -> Params:
        assert request.inference is not None
        body = request.inference.prefill_body(self._handover.prefill_params(name))
        call = EngineCall("POST", request.path, prefill_headers(request.headers), body)
        answer = await self._calls.open(engine, call)
        try:
            if answer.status in _RETRIED:
                raise EngineFault("status", f"answered {answer.status}")
            if answer.status != 200:  # the decode engine answers the client
                raise HandoverFailed(f"it answered {answer.status}")
            text = await answer.read(_MOST_PREFILL_BYTES)
        finally:
            answer.close()
        request.usage.prefill_cached = cached_tokens_of(text)
        if self._handover.is_parallel:
            return {}
        return self._handover.decode_params(engine, name, text)

    async def _decode(self, request: ProxiedRequest, handed: _Handed, deliver: Deliver) -> None:
        tried: list[ProxiedEngine] = []
        last = NoEngineAnswers("no decode engine can be used now")
        for attempt in range(self._config.max_attempts):
            engine = await self._choose_decode(request, tried)
            if engine is None:
                break
            if attempt:
                self._metrics.retries.labels("decode").inc()
            tried.append(engine)
            with engine.busy(request.tokens):
                try:
                    answer = await self._open_decode(engine, request, handed)
                except EngineFault as fault:
                    self._note(engine, request, fault)
                    last = NoEngineAnswers(
                        f"the last decode engine failed: {fault}", is_late=fault.reason == "timeout"
                    )
                    if fault.is_sent and (fault.reason == "timeout" or not request.may_repeat):
                        break
                    if fault.is_sent and not self._handover.is_reusable:
                        handed.lose()
                    continue
                try:
                    is_last = attempt + 1 == self._config.max_attempts
                    if not is_last and self._should_retry(answer, request, tried):
                        self._note(
                            engine, request, EngineFault("status", f"answered {answer.status}")
                        )
                        if not self._handover.is_reusable:
                            handed.lose()
                        continue
                    if answer.status == 200 and request.inference is not None:
                        self._answered.add(request.inference)
                    await deliver(answer)
                    return
                finally:
                    answer.close()
        raise last

    async def _choose_decode(
        self, request: ProxiedRequest, tried: list[ProxiedEngine]
    ) -> ProxiedEngine | None:
        engine = self._decode_pool.choose(request.session, tried)
        if engine is None and tried:
            await asyncio.sleep(_PAUSE_S)
            engine = self._decode_pool.choose(request.session)
        return engine

    def _should_retry(
        self, answer: EngineAnswer, request: ProxiedRequest, tried: list[ProxiedEngine]
    ) -> bool:
        return (
            answer.status in _RETRIED
            and request.may_repeat
            and self._decode_pool.choose(request.session, tried) is not None
        )

    async def _open_decode(
        self, engine: ProxiedEngine, request: ProxiedRequest, handed: _Handed
    ) -> EngineAnswer:
        """Repeat the request without parameters if the prefill fails. Raises EngineFault."""
        call = _decode_call(request, handed.params)
        if handed.running is None:
            return await self._calls.open(engine, call)
        waiting = True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as until:

                def on_end(prefill: "asyncio.Task[Params | None]") -> None:
                    if waiting and not prefill.cancelled() and not _is_done_well(prefill):
                        until.reschedule(loop.time())

                handed.running.add_done_callback(on_end)
                try:
                    return await self._calls.open(engine, call)
                finally:
                    waiting = False
        except TimeoutError:
            if not until.expired():
                raise
        handed.lose()
        return await self._calls.open(engine, _decode_call(request, {}))

    def _note(self, engine: ProxiedEngine, request: ProxiedRequest, fault: EngineFault) -> None:
        log.debug(
            "request %s: %s engine %s: %s", request.request_id, engine.role, engine.name, fault
        )
        self._metrics.faults.labels(engine.role, engine.name, fault.reason).inc()
        self._prober.note_fault(engine, fault)


def _decode_call(request: ProxiedRequest, params: Params) -> EngineCall:
    body = request.body
    if params:
        assert request.inference is not None
        body = request.inference.with_params(params)
    return EngineCall(request.method, request.path, request.headers, body)


def _is_done_well(prefill: "asyncio.Task[Params | None]") -> bool:
    return prefill.exception() is None and prefill.result() is not None


async def _end(prefill: "asyncio.Task[Params | None]") -> None:
    prefill.cancel()
    await asyncio.wait([prefill])
    if not prefill.cancelled() and (error := prefill.exception()) is not None:
        log.error("a prefill failed", exc_info=error)
