"""The tiers below RAM, in order, each behind its guard: no fault is raised."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvhold.core.errors import ConfigError
from kvhold.core.metrics import Metrics
from kvhold.core.status import TierStatus
from kvhold.core.tracing import TraceContext, Tracer
from kvhold.tiers.base import FollowsPeers, Learns
from kvhold.tiers.guard import Guard
from kvhold.tiers.outcomes import Unknown
from kvhold.tiers.registry import make_tier, place_of
from kvhold.tiers.seen_guard import SeenGuard
from kvhold.tiers.suppressed import PendingClear


@dataclass(frozen=True)
class TierPlace:
    tier: int
    nbytes: int


class Stack:
    tracer: Tracer | None = None
    """Set before any call, to trace probes."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self.guards = list(guards)

    def __len__(self) -> int:
        return len(self.guards)

    async def check(self) -> None:
        await asyncio.gather(*(guard.check() for guard in self.guards))

    async def probe(
        self,
        keys: Sequence[bytes],
        silent: set[str] | None = None,
        unknown: Unknown | None = None,
        *,
        trace: TraceContext = "",
        tier: str = "",
    ) -> dict[bytes, TierPlace]:
        """silent: receives the names of tiers that did not answer
        unknown: receives why not
        tier:    the only one
        """
        places: dict[bytes, TierPlace] = {}
        missing = list(keys)
        for number, guard in enumerate(self.guards):
            if not missing:
                break
            if tier and guard.name != tier:
                continue
            if self.tracer is not None and trace:
                sizes = await _probe_traced(self.tracer, trace, guard, missing, silent, unknown)
            else:
                sizes = await guard.probe(missing, silent, unknown)
            places |= {
                key: TierPlace(number, size)
                for key, size in zip(missing, sizes, strict=True)
                if size is not None
            }
            missing = [key for key, size in zip(missing, sizes, strict=True) if size is None]
        return places

    async def clear(self, prefix: bytes, *, shared: bool = True) -> int:
        """Returns the number of removed chunks.

        shared: false leaves out shared tiers, which another host has cleared
        """
        return await self.end_clear(await self.begin_clear(prefix, shared=shared))

    async def begin_clear(
        self, prefix: bytes, *, shared: bool = True, asked_s: float | None = None
    ) -> list[tuple[Guard, PendingClear]]:
        """Suppress the chunks, and journal the clear. The result is for `end_clear`.

        asked_s: see `KeepsClears.advance`
        """
        guards = [guard for guard in self.guards if shared or not guard.traits.shared]
        return list(
            zip(
                guards,
                await asyncio.gather(*(guard.begin_clear(prefix, asked_s) for guard in guards)),
                strict=True,
            )
        )

    async def end_clear(self, pending_clears: Sequence[tuple[Guard, PendingClear]]) -> int:
        return sum(
            await asyncio.gather(
                *(guard.end_clear(pending_clear) for guard, pending_clear in pending_clears)
            )
        )

    def status(self) -> list[TierStatus]:
        return [guard.status() for guard in self.guards]

    async def close(self) -> None:
        await asyncio.gather(*(guard.close() for guard in self.guards))


async def _probe_traced(
    tracer: Tracer,
    trace: TraceContext,
    guard: Guard,
    keys: list[bytes],
    silent: set[str] | None,
    unknown: Unknown | None,
) -> list[int | None]:
    faulty: set[str] = set()
    found, span = (
        0,
        tracer.begin(
            "kvhold.tier.probe",
            trace,
            {"kvhold.tier": guard.name, "kvhold.chunks": len(keys)},
        ),
    )
    try:
        sizes = await guard.probe(keys, faulty, unknown)
        found = sum(size is not None for size in sizes)
    finally:  # also if cancelled
        if silent is not None:
            silent |= faulty
        if span is not None:
            span.end({"kvhold.found_chunks": found}, fault=guard.last_fault if faulty else "")
    return sizes


def learning_tiers(stack: Stack) -> dict[str, Learns]:
    return {
        guard.name: guard.tier
        for guard in stack.guards
        if isinstance(guard.tier, Learns) and guard.tier.learns
    }


def make_stack(urls: Sequence[str], *, plugins: Sequence[str], metrics: Metrics) -> Stack:
    """Raises ConfigError."""
    guards: list[Guard] = []
    for url in urls:
        tier, config = make_tier(url, plugins=plugins)
        names = [guard.name for guard in guards]
        name = config.name
        if name in names:
            name = next(
                f"{name}-{n}" for n in range(2, len(names) + 3) if f"{name}-{n}" not in names
            )
        if name == "ram":
            raise ConfigError("tiers: the name 'ram' is taken by the arena; choose another")
        place = place_of(url)
        same = sum(guard.place.partition("-")[0] == place for guard in guards)
        place = f"{place}-{same + 1}" if same else place
        is_store = tier.traits.shared and not isinstance(tier, FollowsPeers)
        kind = SeenGuard if is_store else Guard
        guards.append(kind(tier, config, name=name, metrics=metrics, place=place))
    return Stack(guards)
