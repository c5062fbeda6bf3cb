import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from kvhold.core.errors import KVHoldError
from kvhold_lab.bench.compare.goals import repeating_goals, visiting_goals
from kvhold_lab.bench.compare.length import LENGTHS, fitting, longest_s
from kvhold_lab.bench.compare.names import TIERS, num_asked
from kvhold_lab.bench.compare.report import draw, render
from kvhold_lab.bench.compare.rounds import SHARES, repeating
from kvhold_lab.bench.compare.rows import SystemRow, failed, make_rows
from kvhold_lab.bench.compare.run import CompareMeasurement, measure
from kvhold_lab.bench.compare.systems import Sizes, started
from kvhold_lab.bench.compare.visits import VISITING, WORKLOADS, ComparePlan, VisitTexts, visiting
from kvhold_lab.bench.compare_engines.lmcache_env import find_lmcache
from kvhold_lab.bench.engines import PEER_SPEC
from kvhold_lab.bench.ratios import Goal, render_goals
from kvhold_lab.bench.rows import machine_and_load, needing_pictures, write_rows
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.options import (
    default_option,
    folder_option,
    json_option,
    lmcache_option,
    model_size_option,
    only_option,
    peer_option,
    plot_option,
    threads_option,
    tokens_option,
)
from kvhold_lab.servers.programs import VERBS, provide

_ROUNDS = click.IntRange(1, 100)


@click.command()
@only_option("--tier", "tiers", type=click.Choice(TIERS))
@only_option("--workload", "names", " working sets", type=click.Choice(list(WORKLOADS)))
@default_option("--rounds", 5, "Rounds for each share of reuse in each working set.", _ROUNDS)
@model_size_option()
@tokens_option(
    None,
    text=f" [default: {LENGTHS[0]}, or {LENGTHS[1]} where that would take more than an hour]",
)
@threads_option()
@peer_option()
@folder_option()
@click.option(
    "--page-cache", is_flag=True, help="Leave files of the disk tier in the kernel's page cache."
)
@lmcache_option()
@json_option()
def command(
    tiers: tuple[str, ...],
    names: tuple[str, ...],
    rounds: int,
    model_size: str,
    tokens: int | None,
    threads: int | None,
    peer: Path | None,
    folder: Path | None,
    page_cache: bool,
    lmcache_env: Path | None,
    json_file: Path | None,
) -> None:
    """Compare kvhold, vLLM alone, its prefix cache and offloading, and LMCache 0.5.6 in real vLLMs.

    The first run makes an environment for LMCache (2 GB). As root on Debian or Ubuntu, it installs
    missing packages (redis-server, libibverbs1), unless KVHOLD_SETUP_SERVERS=0. Exits with 1 if
    kvhold failed, answered differently, or reused nothing.
    """
    tiers = tuple(tier for tier in TIERS if tier in (tiers or TIERS))
    workloads = [WORKLOADS[name] for name in WORKLOADS if name in (names or WORKLOADS)]
    plan = visiting(workloads, rounds=rounds, tiers=tiers, page_cache=page_cache)
    host = _Host.of(model_size, threads, peer)
    provide([VERBS, *(["redis-server"] if "redis" in tiers else [])], click.echo)
    tokens = tokens or _fitting_tokens(host, plan)
    lmcache = find_lmcache(lmcache_env, click.echo)
    found = _compare(plan, host, tokens, lmcache=lmcache, folder=folder)
    _report(found, visiting_goals, json_file)
    _end(plan, found)


@click.command()
@model_size_option()
@tokens_option()
@default_option("--rounds", 7, "Rounds, after one that does not count.", _ROUNDS)
@click.option(
    "--reuse",
    multiple=True,
    type=click.Choice([str(share) for share in SHARES]),
    help="Only these shares of reuse, in %. [default: all]",
)
@threads_option()
@peer_option()
@click.option("--layerwise", is_flag=True, help="Measure also loads and stores a layer at a time.")
@click.option(
    "--unchecked",
    is_flag=True,
    help="Measure also with client.check_memory off: the cost of checksums for a hit.",
)
@json_option()
@plot_option("the curve of TTFT over reuse, such as curve.png")
def vllm(
    model_size: str,
    tokens: int,
    rounds: int,
    reuse: tuple[str, ...],
    threads: int | None,
    peer: Path | None,
    layerwise: bool,
    unchecked: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """`kvhold bench compare` only in memory: kvhold's cost and gain.

    The working set is larger than vLLM's own memory. Exits with 1 if two systems answered
    differently, or if kvhold reused nothing.
    """
    needing_pictures(plot)
    host = _Host.of(model_size, threads, peer)
    if host.peer is None:
        click.echo(
            "vLLM's own offloading is not measured: its host-memory spec is in a "
            "checkout's benchmarks folder; name it with --peer."
        )
    plan = repeating(
        sorted({int(share) for share in reuse}) or SHARES,
        rounds=rounds,
        offloading=host.peer is not None,
        layerwise=layerwise,
        unchecked=unchecked,
    )
    found = _compare(plan, host, tokens)
    _report(found, repeating_goals, json_file)
    if plot is not None:
        draw(found.rows, plot, f"{tokens:,}-token prompts, {host.shape}")
    _end(plan, found)


@dataclass(frozen=True)
class _Host:
    model: ModelInfo
    threads: int
    peer: Path | None

    @classmethod
    def of(cls, model_size: str, threads: int | None, peer: Path | None) -> "_Host":
        if not is_vllm_available():
            raise click.ClickException(
                "vLLM is not installed here: this command measures a real one"
            )
        host = cls(
            make_model(model_size),
            threads or len(os.sched_getaffinity(0)),
            peer or (PEER_SPEC if PEER_SPEC.is_file() else None),
        )
        click.echo(f"{machine_and_load()}; {host.shape}")
        return host

    @property
    def shape(self) -> str:
        return (
            f"{self.model.num_parameters / 1e6:.0f}M parameters, vLLM on {self.threads} CPU "
            f"thread{'s' * (self.threads > 1)}"
        )


@dataclass(frozen=True)
class _Result:
    measured: CompareMeasurement
    began: float
    rows: list[SystemRow]
    stopped: str


def _compare(
    plan: ComparePlan,
    host: _Host,
    tokens: int,
    *,
    lmcache: Path | str = "",
    folder: Path | None = None,
) -> _Result:
    began, stopped = time.monotonic(), ""
    click.echo(f"starting the engines, for prompts of {tokens:,} tokens ...")
    sizes = Sizes(host.model, tokens, plan.held_prompts, plan.output_tokens)
    measured = CompareMeasurement()
    with started(
        sizes, plan, num_threads=host.threads, peer=host.peer, lmcache=lmcache, folder=folder
    ) as running:
        unable = f"; cannot run: {'; '.join(running.errors)}" if running.errors else ""
        click.echo(f"{len(running.systems)} systems after {time.monotonic() - began:.0f} s{unable}")
        try:
            measure(running, VisitTexts(host.model.path, tokens), plan, measured, say=click.echo)
        except KeyboardInterrupt:
            if not measured.cells:
                raise
            click.echo("interrupted: this is what was measured until then")
        except KVHoldError as error:
            if plan.strict or not measured.cells:
                raise
            stopped = str(error)
    return _Result(measured, began, make_rows(measured, plan.tiers), stopped)


def _report(
    result: _Result,
    goals: Callable[[CompareMeasurement, Sequence[SystemRow]], list[Goal]],
    json_file: Path | None,
) -> None:
    click.echo(
        f"\n{render(result.rows)}\n\n{render_goals(goals(result.measured, result.rows))}"
        f"\n\n{(time.monotonic() - result.began) / 60:.0f} minutes"
    )
    write_rows(json_file, result.rows)


def _end(plan: ComparePlan, result: _Result) -> None:
    if bad := failed(result.rows, most_reuse=plan.most_reuse, strict=plan.strict):
        places = sorted({f"{row.system} ({row.tier}, {row.workload})" for row in bad})
        click.echo(f"kvhold bench {plan.command}: FAILED: {', '.join(places)}", err=True)
    if result.stopped:
        click.echo(
            f"kvhold bench {plan.command}: FAILED, and this is what was measured until then: "
            f"{result.stopped}",
            err=True,
        )
    if bad or result.stopped:
        sys.exit(1)


def _fitting_tokens(host: _Host, plan: ComparePlan) -> int:
    prefill_s = longest_s(host.model, num_threads=host.threads)
    planned = [visit for stage in plan.stages for visit in stage.visits]
    tokens, expected_s = fitting(prefill_s, planned, num_asked(VISITING, plan.tiers))
    click.echo(
        f"{LENGTHS[0]:,} tokens take {prefill_s:.2f} s to compute: prompts are of "
        f"{tokens:,}, for about {expected_s / 60:.0f} min"
    )
    return tokens
