import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvhold_lab.demo.report import draw, render
from kvhold_lab.demo.run import run
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import make_model
from kvhold_lab.options import (
    default_option,
    json_option,
    model_size_option,
    plot_option,
    tokens_option,
)


@click.command()
@model_size_option()
@tokens_option()
@default_option("--repeats", 3, "Number of prompts; the times are medians.", click.IntRange(1, 20))
@click.option(
    "--pd",
    "is_pair",
    is_flag=True,
    help="Show prefill and decode on two engines behind `kvhold proxy` instead.",
)
@json_option("the figures")
@plot_option("the table as a picture, such as demo.png", "--picture")
def command(
    model_size: str,
    tokens: int,
    repeats: int,
    is_pair: bool,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Show a real engine's time to first token: cold, on a hit, and on a hit in a new process.

    Exits with 1 if a hit changed an output, or nothing was reused.
    """
    if is_pair:
        _show_pair(model_size, tokens, repeats, json_file, picture)
        return
    if not is_vllm_available():
        click.echo("vLLM is not installed here; the demo runs on transformers instead.")
    click.echo(
        f"making the model {model_size} (random weights, fixed seed; kept for the next time) ..."
    )
    model = make_model(model_size)
    result = run(model, num_tokens=tokens, repeats=repeats, say=click.echo)
    click.echo(f"\n{render(result)}\n")
    _write_files(result.as_json(), json_file, partial(draw, result), picture)
    _check(result.tokens_reused, "nothing was reused", identical=result.identical)


def _show_pair(
    model_size: str, tokens: int, repeats: int, json_file: Path | None, picture: Path | None
) -> None:
    from kvhold_lab.demo.pair import run_pair
    from kvhold_lab.demo.pair_report import draw_pair, render_pair

    if not is_vllm_available():
        raise click.ClickException("kvhold demo --pd needs vLLM, which is not installed here")
    model = make_model(model_size)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    result = run_pair(model, num_tokens=tokens, repeats=repeats, threads=threads, say=click.echo)
    click.echo(f"\n{render_pair(result)}\n")
    _write_files(result.as_json(), json_file, partial(draw_pair, result), picture)
    _check(result.handed_tokens, "nothing was handed over", identical=result.identical)


def _write_files(
    figures: dict[str, Any],
    json_file: Path | None,
    draw_to: Callable[[Path], None],
    picture: Path | None,
) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if picture is not None:
        draw_to(picture)
        click.echo(f"picture: {picture}")


def _check(tokens: int, fault: str, *, identical: bool) -> None:
    """fault: what zero tokens mean"""
    if not identical or not tokens:
        fault = fault if identical else "the outputs differ"
        click.echo(f"kvhold demo: FAILED: {fault}", err=True)
        sys.exit(1)
