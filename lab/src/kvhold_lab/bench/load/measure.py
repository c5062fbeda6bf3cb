"""Warm-up requests, a workload's phases, and the server's counters of each."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean

import click

from kvhold.core.errors import KVHoldError
from kvhold_lab.bench.load import counters
from kvhold_lab.bench.load.client import Endpoint, LoadClient
from kvhold_lab.bench.load.in_turns import InTurns
from kvhold_lab.bench.load.prompts import Prompts
from kvhold_lab.bench.load.runner import LoadRun
from kvhold_lab.bench.load.work import Phase, Request, Result, Turn, Workload

_PREWARM_TOKENS, _PREWARM_OUTPUT = 64, 8
_TERMINAL_EVERY_S = 0.5
_CLEAR = "\x1b[K"


class Unanswered(KVHoldError): ...


@dataclass
class LoadMeasurement:
    results: list[Result] = field(default_factory=list)
    hits: dict[str, counters.Hits] = field(default_factory=dict)
    interrupted: bool = False


async def measure(
    endpoint: Endpoint,
    workload: Workload,
    prompts: Prompts,
    measured: LoadMeasurement,
    *,
    prewarm: int,
    progress_s: float,
    keep: Callable[[Result], None],
) -> None:
    """Raises ConfigError, Unanswered."""
    async with LoadClient(endpoint) as client:
        await _prewarm(client, prompts, prewarm)

        def both(result: Result) -> None:
            measured.results.append(result)
            keep(result)

        run = LoadRun(client.send, both)
        for phase in workload.phases(prompts):
            await _measure_phase(phase, run, [(client, measured)], progress_s)
            if measured.interrupted:
                return


async def measure_in_turns(
    endpoints: Mapping[str, Endpoint],
    workload: Workload,
    prompts: Prompts,
    measured: Mapping[str, LoadMeasurement],
    *,
    prewarm: int,
    progress_s: float,
    keep: Callable[[str, Result], None],
) -> None:
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(LoadClient(endpoint))
            for name, endpoint in endpoints.items()
        }
        for client in clients.values():
            await _prewarm(client, prompts, prewarm)

        def both(name: str, result: Result) -> None:
            measured[name].results.append(result)
            keep(name, result)

        turns = InTurns({name: client.send for name, client in clients.items()}, both)
        run = LoadRun(turns.send, lambda _: None)
        sides = [(client, measured[name]) for name, client in clients.items()]
        for phase in workload.phases(prompts):
            await _measure_phase(phase, run, sides, progress_s)
            if sides[0][1].interrupted:
                return


async def _measure_phase(
    phase: Phase,
    run: LoadRun,
    sides: Sequence[tuple[LoadClient, LoadMeasurement]],
    progress_s: float,
) -> None:
    measured = sides[0][1]
    before = [await _counts(client) for client, _ in sides]
    first = len(measured.results)
    shown = asyncio.create_task(_show(phase, run, measured, first, every_s=progress_s))
    try:
        await run.phase(phase)
    except asyncio.CancelledError:
        for _, own in sides:
            own.interrupted = True
    finally:
        shown.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await shown
    click.echo(f"{_line(phase, measured.results[first:])}{_CLEAR if sys.stdout.isatty() else ''}")
    for counts, (client, own) in zip(before, sides, strict=True):
        if (spent := counters.hits(counts, await _counts(client))) is not None:
            own.hits[phase.name] = spent


async def model_of(endpoint: Endpoint) -> str:
    async with LoadClient(endpoint) as client:
        return await client.only_model()


async def _prewarm(client: LoadClient, prompts: Prompts, count: int) -> None:
    failures = []
    for number in range(count):
        turns = (Turn("user", prompts.piece("prewarm", number, _PREWARM_TOKENS)),)
        reply = await client.send(Request("prewarm", turns, _PREWARM_OUTPUT))
        if reply.error is not None:
            failures.append(f"{reply.error}: {reply.detail}")
    if count and len(failures) == count:
        raise Unanswered(
            f"the server answered none of {count} first requests; the last: {failures[-1]}"
        )


async def _counts(client: LoadClient) -> counters.Counts | None:
    page = await client.metrics_page()
    return counters.read(page) if page is not None else None


async def _show(
    phase: Phase, run: LoadRun, measured: LoadMeasurement, first: int, *, every_s: float
) -> None:
    is_terminal = sys.stdout.isatty()
    while True:
        await asyncio.sleep(_TERMINAL_EVERY_S if is_terminal else every_s)
        line = f"{_line(phase, measured.results[first:])}, {run.in_flight} in flight"
        click.echo(f"{line}{_CLEAR}\r" if is_terminal else line, nl=not is_terminal)


def _line(phase: Phase, results: list[Result]) -> str:
    of_all = f" of {phase.total:,}" if phase.total is not None else ""
    good = [result.reply for result in results if result.reply.error is None]
    parts = [f"{phase.name}: {len(results):,}{of_all} done, {len(results) - len(good):,} errors"]
    times = [reply.ttft_s for reply in good if reply.ttft_s is not None]
    if times:
        elapsed_s = max(result.started_s + result.reply.latency_s for result in results) - min(
            result.started_s for result in results
        )
        parts.append(
            f"mean TTFT {fmean(times):.3f} s, "
            f"{sum(reply.output_tokens for reply in good) / elapsed_s:,.0f} output tokens/s"
        )
    return ", ".join(parts)
