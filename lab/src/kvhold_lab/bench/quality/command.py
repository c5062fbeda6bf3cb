"""`kvhold bench quality`."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from kvhold.codecs import codec_names
from kvhold_lab.bench.quality.report import draw, render, render_channels
from kvhold_lab.bench.quality.run import CHUNK_TOKENS, CONTEXTS, OTHER_CONTEXTS, evaluate
from kvhold_lab.bench.rows import needing
from kvhold_lab.options import PICTURES, OutputFile


@click.command()
@click.option(
    "--codecs", "only", help="Only these, separated by commas. [default: all, plugins too]"
)
@click.option(
    "--model",
    help="A causal language model for transformers, a folder or a name. [default: the small one "
    "of a checkout]",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Ask how this text goes on, not questions.",
)
@click.option(
    "--contexts",
    type=click.IntRange(2),
    help=f"How many. [default: {CONTEXTS}, {OTHER_CONTEXTS} with --model]",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1),
    default=CHUNK_TOKENS,
    show_default=True,
    help="Tokens of a chunk.",
)
@click.option("--json", "json_file", type=OutputFile(), help="Write the rows to this file.")
@click.option(
    "--plot", type=OutputFile(*PICTURES), help="Draw accuracy over ratio, such as quality.svg."
)
def command(
    only: str | None,
    model: str | None,
    text: Path | None,
    contexts: int | None,
    chunk_tokens: int,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """The cost of each codec in answers: KV through frames and back, then questions.

    Every codec gets the questions of the untouched KV. A drop is in points of accuracy, with its
    standard error.
    """
    known = codec_names()
    names = tuple(name.strip() for name in only.split(",")) if only is not None else known
    if unknown := sorted(set(names) - set(known)):
        raise click.UsageError(f"{', '.join(unknown)}: known are {', '.join(known)}")
    if plot is not None:
        with needing("'kvhold[lab]'"):
            import matplotlib  # noqa: F401 - better known now than after the run
    found = evaluate(
        names, model=model, text=text, num_contexts=contexts, chunk_tokens=chunk_tokens
    )
    click.echo(
        f"{found.what}; chunks of {chunk_tokens} "
        f"tokens\n\n{render(found.rows)}\n\n{render_channels(found.channels)}"
    )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in found.rows], indent=2) + "\n")
    if plot is not None:
        draw(
            found.rows,
            plot,
            "Answers right, by how much smaller KV is"
            if text is None
            else "Divergence, by how much smaller KV is",
        )
