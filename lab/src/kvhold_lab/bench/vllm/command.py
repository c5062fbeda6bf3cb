"""`kvhold bench vllm`."""

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import click

from kvhold_lab.bench.engines import PEER_SPEC
from kvhold_lab.bench.ratios import Cell, render_goals
from kvhold_lab.bench.rows import needing
from kvhold_lab.bench.vllm.figures import goals, make_rows
from kvhold_lab.bench.vllm.report import draw, render
from kvhold_lab.bench.vllm.run import HELD_PROMPTS, REUSE_PERCENT, rounds
from kvhold_lab.bench.vllm.systems import KVHOLD, started
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import SIZES, make_model
from kvhold_lab.options import PICTURES, OutputFile


@click.command()
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
    default=4_000,
    show_default=True,
    help="Length of the prompts.",
)
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(1, 100),
    default=7,
    show_default=True,
    help="Beside one that does not count.",
)
@click.option(
    "--reuse",
    multiple=True,
    type=click.Choice([str(reuse) for reuse in REUSE_PERCENT]),
    help="These shares alone, in %. [default: all]",
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
    "--layerwise", is_flag=True, help="Also loads and stores a layer at a time, beside the default."
)
@click.option(
    "--unchecked",
    is_flag=True,
    help="Also with client.check_memory off: what comparing checksums costs a hit.",
)
@click.option("--json", "json_file", type=OutputFile(), help="Write the rows to this file.")
@click.option(
    "--plot",
    type=OutputFile(*PICTURES),
    help="Draw the curve of TTFT over reuse, such as curve.png.",
)
def command(
    model_size: str,
    tokens: int,
    num_rounds: int,
    reuse: tuple[str, ...],
    threads: int | None,
    peer: Path | None,
    layerwise: bool,
    unchecked: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """A real vLLM with kvhold beside vLLM alone, its offloading, and an unlimited prefix cache.

    TTFT and throughput by reuse, in a working set larger than vLLM's own memory. Exits with 1 if
    two systems answered differently, or if kvhold reused nothing. Times do not decide that; the
    goals' verdicts are printed. Ctrl-C ends it after the first round with the results so far.
    """
    if not is_vllm_available():
        raise click.ClickException("vLLM is not installed here: this command measures a real one")
    if plot is not None:
        with needing("'kvhold[lab]'"):
            import matplotlib  # noqa: F401 - better known now than after the run
    if peer is None and PEER_SPEC.is_file():
        peer = PEER_SPEC
    if peer is None:
        click.echo(
            "vLLM's own offloading is not measured: its host-memory spec is in a "
            "checkout's benchmarks folder; name it with --peer."
        )
    model = make_model(model_size)
    threads = threads or len(os.sched_getaffinity(0))
    title = (
        f"{tokens:,}-token prompts, {model.num_parameters / 1e6:.0f}M parameters, vLLM on "
        f"{threads} CPU thread{'s' * (threads > 1)}"
    )
    click.echo(
        f"{platform.machine()}, Python {platform.python_version()}, {title}\nstarting the "
        "engines ..."
    )
    held = HELD_PROMPTS * tokens
    shares = sorted({int(each) for each in reuse}) or REUSE_PERCENT
    with started(
        model,
        num_tokens=tokens,
        held_tokens=held,
        num_threads=threads,
        peer=peer,
        layerwise=layerwise,
        unchecked=unchecked,
    ) as systems:
        cells: list[Cell] = []
        try:
            for cells_of_round in rounds(
                systems,
                model,
                num_tokens=tokens,
                num_rounds=num_rounds,
                shares=shares,
                say=click.echo,
            ):
                cells += cells_of_round
        except KeyboardInterrupt:
            if not cells:
                raise
            click.echo("interrupted: these are the rounds that were finished")
    rows = make_rows(cells)
    click.echo(f"\n{render(rows)}\n\n{render_goals(goals(rows))}\n")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if plot is not None:
        draw(rows, plot, title)
    if not all(
        row.cached_tokens
        for row in rows
        if row.system == KVHOLD and row.reuse and row.reuse == max(shares)
    ):
        click.echo("kvhold bench vllm: FAILED: nothing was reused", err=True)
        sys.exit(1)
