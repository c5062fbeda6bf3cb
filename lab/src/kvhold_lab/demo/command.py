import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvhold_lab.bench.rows import machine_and_load, needing
from kvhold_lab.demo.report import draw, render
from kvhold_lab.demo.run import run
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import make_model
from kvhold_lab.interruption import ending_in_order
from kvhold_lab.options import (
    default_option,
    json_option,
    model_size_option,
    plot_option,
    tokens_option,
)

_BLEND_REPEATS = 5
_PERMIT_PROMPTS = 150


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
@click.option(
    "--blend",
    "is_blend",
    is_flag=True,
    help="Show five documents in an order never seen instead (transformers; trains a small model "
    "the first time).",
)
@json_option("the figures")
@plot_option("the table as a picture, such as demo.png", "--picture")
def command(
    model_size: str,
    tokens: int,
    repeats: int,
    is_pair: bool,
    is_blend: bool,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Show a real engine's time to first token: cold, on a hit, and on a hit in a new process.

    Exits with 1 if a hit changed an output, or nothing was reused.
    """
    if is_pair and is_blend:
        raise click.UsageError("give --pd or --blend, not both")
    with ending_in_order():
        if is_blend:
            _show_blend(tokens, max(repeats, _BLEND_REPEATS), json_file, picture)
        elif is_pair:
            _show_pair(model_size, tokens, repeats, json_file, picture)
        else:
            _show(model_size, tokens, repeats, json_file, picture)


def _show(
    model_size: str, tokens: int, repeats: int, json_file: Path | None, picture: Path | None
) -> None:
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


def _show_blend(tokens: int, repeats: int, json_file: Path | None, picture: Path | None) -> None:
    with needing("'kvhold[transformers]'"):
        from kvhold_lab.demo.blend import run_blend
        from kvhold_lab.demo.blend_report import draw_blend, render_blend

    result = run_blend(
        num_tokens=tokens, repeats=repeats, permit_prompts=_PERMIT_PROMPTS, say=click.echo
    )
    click.echo(f"\n{machine_and_load()}\n{render_blend(result)}\n")
    figures = result.as_json()
    _write_files(figures, json_file, partial(draw_blend, result), picture)
    if not figures["reused_tokens"]:
        click.echo("kvhold demo: FAILED: nothing was reused", err=True)
        sys.exit(1)


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
    if not identical or not tokens:
        fault = fault if identical else "the outputs differ"
        click.echo(f"kvhold demo: FAILED: {fault}", err=True)
        sys.exit(1)
