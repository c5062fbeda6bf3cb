"""`kvhold bench compare`."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from kvhold.core.errors import KVHoldError
from kvhold_lab.bench.compare.length import LENGTHS, fitting, longest_s
from kvhold_lab.bench.compare.report import render
from kvhold_lab.bench.compare.rows import failed, goals, make_rows
from kvhold_lab.bench.compare.run import CompareMeasurement, measure
from kvhold_lab.bench.compare.systems import TIERS, Sizes, num_asked, started
from kvhold_lab.bench.compare.visits import (
    WORKLOADS,
    VisitTexts,
    VisitWorkload,
    held_prompts,
    visits,
)
from kvhold_lab.bench.compare_engines.lmcache_env import (
    LMCACHE,
    NoLMCache,
    environment_folder,
    lmcache_python,
)
from kvhold_lab.bench.engines import PEER_SPEC
from kvhold_lab.bench.ratios import render_goals
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import SIZES, ModelInfo, make_model
from kvhold_lab.options import OutputFile
from kvhold_lab.servers.programs import VERBS, provide


@click.command()
@click.option(
    "--tier", "tiers", multiple=True, type=click.Choice(TIERS), help="Only these. [default: all]"
)
@click.option(
    "--workload",
    "names",
    multiple=True,
    type=click.Choice(list(WORKLOADS)),
    help="Only these working sets. [default: all]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=5,
    show_default=True,
    help="Of each share of reuse in each working set.",
)
@click.option(
    "--model-size",
    type=click.Choice(list(SIZES)),
    default="small",
    show_default=True,
    help="tiny 5M, small 50M, mid 206M.",
)
@click.option(
    "--tokens",
    type=click.IntRange(512, 16_000),
    help=f"Length of the prompts. [default: {LENGTHS[0]}, or {LENGTHS[1]} where that would take "
    "more than an hour]",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads of each engine; fewer where others use the cores. [default: all cores]",
)
@click.option(
    "--peer",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Host-memory spec for vLLM's offloading.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="On which disk. [default: of temporary files]",
)
@click.option(
    "--page-cache", is_flag=True, help="Leave files of the disk tier in the kernel's page cache."
)
@click.option(
    "--lmcache-env",
    type=click.Path(file_okay=False, path_type=Path),
    help="LMCache's environment. [default: in your cache folder]",
)
@click.option("--json", "json_file", type=OutputFile(), help="Write the rows to this file.")
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
    """kvhold in a real vLLM beside vLLM alone, its prefix cache and offloading, and LMCache 0.5.6.

    TTFT and throughput by tier, working set and reuse. LMCache gets its own environment, made the
    first time (2 GB). Root on Debian or Ubuntu gets missing packages (redis-server, libibverbs1),
    unless KVHOLD_SETUP_SERVERS=0. Exits with 1 if kvhold failed, answered differently, or reused
    nothing. Times do not decide that; the goals' verdicts are printed. Ctrl-C shows the results so
    far.
    """
    if not is_vllm_available():
        raise click.ClickException("vLLM is not installed here: this command measures a real one")
    began = time.monotonic()
    tiers = tuple(tier for tier in TIERS if tier in (tiers or TIERS))
    workloads = [WORKLOADS[name] for name in WORKLOADS if name in (names or WORKLOADS)]
    model, threads = make_model(model_size), threads or len(os.sched_getaffinity(0))
    shape = (
        f"{model.num_parameters / 1e6:.0f}M parameters, vLLM on {threads} CPU "
        f"thread{'s' * (threads > 1)}"
    )
    click.echo(
        f"{platform.machine()}, Python {platform.python_version()}, load "
        f"{os.getloadavg()[0]:.1f}; {shape}"
    )
    provide([VERBS, *(["redis-server"] if "redis" in tiers else [])], click.echo)
    tokens = tokens or _fitting_tokens(model, tiers, workloads, rounds=rounds, threads=threads)
    click.echo(f"LMCache {LMCACHE} in {lmcache_env or environment_folder()} ...")
    try:
        lmcache: Path | str = lmcache_python(lmcache_env or environment_folder())
    except NoLMCache as error:
        lmcache = str(error)
    click.echo(f"starting the engines, for prompts of {tokens:,} tokens ...")
    stopped = ""
    sizes, measured = Sizes(model, tokens, held_prompts(workloads)), CompareMeasurement()
    peer = peer or (PEER_SPEC if PEER_SPEC.is_file() else None)
    with started(
        sizes, tiers=tiers, num_threads=threads, peer=peer, lmcache=lmcache, folder=folder
    ) as running:
        unable = f"; cannot run: {'; '.join(running.errors)}" if running.errors else ""
        click.echo(f"{len(running.systems)} systems after {time.monotonic() - began:.0f} s{unable}")
        try:
            texts = VisitTexts(model.path, tokens)
            measure(
                running,
                texts,
                workloads,
                measured,
                rounds=rounds,
                page_cache=page_cache,
                say=click.echo,
            )
        except KeyboardInterrupt:
            if not measured.cells:
                raise
            click.echo("interrupted: this is what was measured until then")
        except KVHoldError as error:
            if not measured.cells:
                raise
            stopped = str(error)
    _report(measured, tiers, began, stopped, json_file)


def _report(
    measured: CompareMeasurement,
    tiers: Sequence[str],
    began: float,
    stopped: str,
    json_file: Path | None,
) -> None:
    """Print and write the rows. Exits with 1 for a failed row, or if the measurement stopped."""
    rows = make_rows(measured, tiers)
    click.echo(
        f"\n{render(rows)}\n\n{render_goals(goals(measured, rows))}"
        f"\n\n{(time.monotonic() - began) / 60:.0f} minutes"
    )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if bad := failed(rows):
        places = sorted({f"{row.system} ({row.tier}, {row.workload})" for row in bad})
        click.echo(f"kvhold bench compare: FAILED: {', '.join(places)}", err=True)
    if stopped:
        click.echo(
            f"kvhold bench compare: FAILED, and this is what was measured until then: {stopped}",
            err=True,
        )
    if bad or stopped:
        sys.exit(1)


def _fitting_tokens(
    model: ModelInfo,
    tiers: Sequence[str],
    workloads: Sequence[VisitWorkload],
    *,
    rounds: int,
    threads: int,
) -> int:
    prefill_s = longest_s(model, num_threads=threads)
    planned = [visit for workload in workloads for visit in visits(workload, rounds=rounds)]
    tokens, expected_s = fitting(prefill_s, planned, num_asked(tiers))
    click.echo(
        f"{LENGTHS[0]:,} tokens take {prefill_s:.2f} s to compute: prompts are of "
        f"{tokens:,}, for about {expected_s / 60:.0f} min"
    )
    return tokens
