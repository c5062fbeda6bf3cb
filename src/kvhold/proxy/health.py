"""Probe the engines, failing ones ever less often. The requests' event loop."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from kvhold.core.proxy_config import ProxyConfig
from kvhold.proxy.engines import ProxiedEngine
from kvhold.proxy.faults import EngineFault

log = logging.getLogger(__name__)


class HealthProber:
    def __init__(
        self,
        engines: Sequence[ProxiedEngine],
        probe: Callable[[ProxiedEngine], Awaitable[None]],
        config: ProxyConfig,
        on_change: Callable[[], None],
    ) -> None:
        """probe: raises EngineFault; on_change: called with each change"""
        self._engines = tuple(engines)
        self._probe = probe
        self._config = config
        self._on_change = on_change
        self._probe_now = {engine: asyncio.Event() for engine in engines}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch(engine)) for engine in self._engines]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def note_fault(self, engine: ProxiedEngine, fault: EngineFault) -> None:
        if fault.reason == "refused" and engine.is_up:
            self._mark_down(engine, fault)
        if fault.reason in ("refused", "disconnected") or not fault.is_sent:
            self._probe_now[engine].set()

    async def _watch(self, engine: ProxiedEngine) -> None:
        while True:
            event = self._probe_now[engine]
            event.clear()
            try:
                await self._probe_once(engine)
            except Exception:
                log.exception("probing %s engine %s", engine.role, engine.name)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(engine)):
                    await event.wait()
            if not engine.is_up:
                await asyncio.sleep(self._config.probe_interval_s / 4)

    async def _probe_once(self, engine: ProxiedEngine) -> None:
        try:
            await self._probe(engine)
        except EngineFault as fault:
            engine.num_failures += 1
            engine.cause = str(fault)
            if engine.is_up and (
                fault.reason == "refused" or engine.num_failures >= self._config.probe_failures
            ):
                self._mark_down(engine, fault)
                if fault.reason == "timeout" and self._is_replaceable(engine):
                    engine.give_up()
        else:
            engine.num_failures = 0
            if not engine.is_up:
                engine.is_up = True
                engine.cause = ""
                log.info("%s engine %s can be used", engine.role, engine.name)
                self._on_change()

    def _mark_down(self, engine: ProxiedEngine, fault: EngineFault) -> None:
        engine.is_up = False
        engine.cause = str(fault)
        log.warning("%s engine %s is not used: %s", engine.role, engine.name, fault)
        self._on_change()

    def _is_replaceable(self, engine: ProxiedEngine) -> bool:
        others = (other for other in self._engines if other.role == "decode")
        return engine.role == "prefill" or any(other.is_usable for other in others)

    def _pause_s(self, engine: ProxiedEngine) -> float:
        interval_s = self._config.probe_interval_s
        if engine.is_up:
            return interval_s
        most_s = max(interval_s, self._config.probe_max_interval_s)
        pause_s = min(most_s, interval_s * 2.0 ** min(engine.num_failures - 1, 30))
        return pause_s * random.uniform(0.75, 1.0)
