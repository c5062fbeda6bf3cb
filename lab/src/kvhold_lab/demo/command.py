"""`kvhold demo`."""

import json
import sys
from pathlib import Path

import click

from kvhold_lab.demo.report import draw, render
from kvhold_lab.demo.run import run
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import SIZES, make_model
from kvhold_lab.options import PICTURES, OutputFile


@click.command()
@click.option(
    "--model-size",
    type=click.Choice(list(SIZES)),
    default="small",
    show_default=True,
    help="tiny 5M, small 50M, mid 206M parameters.",
)
@click.option(
    "--tokens",
    type=click.IntRange(512, 16_000),
    default=4_000,
    show_default=True,
    help="Length of the prompts.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 20),
    default=3,
    show_default=True,
    help="How many prompts; the times are medians.",
)
@click.option("--json", "json_file", type=OutputFile(), help="Write the figures to this file.")
@click.option(
    "--picture", type=OutputFile(*PICTURES), help="Draw the table as a picture, such as demo.png."
)
def command(
    model_size: str, tokens: int, repeats: int, json_file: Path | None, picture: Path | None
) -> None:
    """Show a real engine's time to first token: cold, on a hit, and on a hit in a new process.

    Exits with 1 if a hit changed an output, or nothing was reused.
    """
    if not is_vllm_available():
        click.echo("vLLM is not installed here; the demo runs on transformers instead.")
    click.echo(
        f"making the model {model_size} (random weights, fixed seed; kept for the next time) ..."
    )
    model = make_model(model_size)
    result = run(model, num_tokens=tokens, repeats=repeats, say=click.echo)
    click.echo(f"\n{render(result)}\n")
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    if picture is not None:
        draw(result, picture)
        click.echo(f"picture: {picture}")
    if not result.identical or not result.tokens_reused:
        click.echo(
            "kvhold demo: FAILED: "
            + ("the outputs differ" if not result.identical else "nothing was reused"),
            err=True,
        )
        sys.exit(1)
