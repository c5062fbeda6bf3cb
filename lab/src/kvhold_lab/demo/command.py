import json
import sys
from pathlib import Path

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
@json_option("the figures")
@plot_option("the table as a picture, such as demo.png", "--picture")
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
