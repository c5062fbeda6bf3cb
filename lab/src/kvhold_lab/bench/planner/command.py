import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import click

from kvhold_lab.bench.rows import needing
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import make_model
from kvhold_lab.options import (
    Number,
    default_option,
    json_option,
    model_size_option,
    threads_option,
)


@click.command()
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Trace of requests, in Mooncake's format (FAST 2025).",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(2, 10_000),
    default=60,
    show_default=True,
    help="Number of requests that are drawn from the trace.",
)
@default_option("--seed", 1, "Seed of the choice of conversations.", click.INT)
@click.option(
    "--speed",
    "speeds",
    type=Number(0.001),
    multiple=True,
    default=(0.1, 1.0, 10.0),
    show_default=True,
    help="Speed of the link; 1: as fast as the engine computes KV.",
)
@model_size_option("tiny")
@threads_option("Threads of each engine.")
@json_option()
def command(
    trace: Path,
    num_requests: int,
    seed: int,
    speeds: tuple[float, ...],
    model_size: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Send conversations of a trace to real vLLMs behind a slow link: load, compute, or plan.

    Exits with an error if two answers differ. As root on Debian or Ubuntu, it installs
    redis-server, unless KVHOLD_SETUP_SERVERS=0.
    """
    if not is_vllm_available():
        raise click.ClickException("vLLM is not installed here: this command measures a real one")
    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.planner.figures import make_row
        from kvhold_lab.bench.planner.run import break_even_bytes_s, cells
        from kvhold_lab.bench.planner.sample import sample, seen_before
        from kvhold_lab.servers.base import NotInstalled, program
        from kvhold_lab.servers.programs import provide

    provide(["redis-server"], click.echo)
    try:
        program("redis-server", "apt-get install redis-server")
    except NotInstalled as error:
        raise click.ClickException(str(error)) from None
    prompts = sample(trace, num_requests=num_requests, seed=seed)
    model, threads = make_model(model_size), threads or len(os.sched_getaffinity(0))
    tokens = sum(map(len, prompts))
    click.echo(
        f"{platform.machine()}, Python {platform.python_version()}, "
        f"{model.num_parameters / 1e6:.0f}M parameters, {threads} threads\n"
        f"{len(prompts)} requests of {tokens / len(prompts):,.0f} tokens on average, "
        f"{seen_before(prompts):.0%} of them seen before"
    )
    break_even = break_even_bytes_s(model, prompts[:8], num_threads=threads)
    click.echo(f"break-even: {break_even / 1e6:.2f} MB/s\n")
    columns = (
        f"{'link MB/s':>9}",
        f"{'compute s':>10}",
        f"{'load s':>8}",
        f"{'plan s':>8}",
        f"{'load':>6}",
        f"{'plan':>6}",
    )
    click.echo(" ".join([*columns, f"{'plan/best, 95 % interval':>26}", f"{'loaded':>15}"]))
    rows = []
    for speed in speeds:
        counters: dict[str, float] = {}
        found = list(
            cells(
                model,
                prompts,
                bytes_per_s=speed * break_even,
                num_threads=threads,
                plans=counters.update,
            )
        )
        row = make_row(found, speed=speed, bytes_per_s=speed * break_even)
        plans = {name: value for name, value in counters.items() if name.startswith("kvhold_plans")}
        rows.append(asdict(row) | {"plans": plans, "cells": [asdict(cell) for cell in found]})
        best = f"{row.to_best.value:.3f} ({row.to_best.low:.3f}-{row.to_best.high:.3f})"
        loaded = f"{row.load_loaded:.1%}, {row.plan_loaded:.1%}"
        click.echo(
            f"{row.mb_s:9.2f} {row.compute_p50_s:10.3f} {row.load_p50_s:8.3f} {row.plan_p50_s:8.3f}"
            f" {row.load.value:6.3f} {row.plan.value:6.3f} {best:>26} {loaded:>15}"
        )
        if json_file is not None:
            json_file.write_text(json.dumps(rows, indent=2) + "\n")
