from pathlib import Path

import click

from kvhold.codecs import codec_names
from kvhold_lab.bench.quality.report import draw, render, render_channels
from kvhold_lab.bench.quality.run import CHUNK_TOKENS, CONTEXTS, OTHER_CONTEXTS, evaluate
from kvhold_lab.bench.rows import needing_pictures, write_rows
from kvhold_lab.options import default_option, json_option, plot_option


@click.command()
@click.option(
    "--codecs", "only", help="Only these codecs, separated by commas. [default: all, plugins too]"
)
@click.option(
    "--model",
    help="Folder or name of a causal language model for transformers. [default: the small model "
    "of a checkout]",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Predict how this text continues, instead of asking questions.",
)
@click.option(
    "--contexts",
    type=click.IntRange(2),
    help=f"Number of contexts. [default: {CONTEXTS}, {OTHER_CONTEXTS} with --model]",
)
@default_option("--chunk-tokens", CHUNK_TOKENS, "Tokens of a chunk.")
@json_option()
@plot_option("accuracy over ratio, such as quality.svg")
def command(
    only: str | None,
    model: str | None,
    text: Path | None,
    contexts: int | None,
    chunk_tokens: int,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Measure the cost of each codec in answers.

    Every codec gets the same questions as the unchanged KV. A drop is in points of accuracy, with
    its standard error.
    """
    known = codec_names()
    names = tuple(name.strip() for name in only.split(",")) if only is not None else known
    if unknown := sorted(set(names) - set(known)):
        raise click.UsageError(f"{', '.join(unknown)}: known are {', '.join(known)}")
    needing_pictures(plot)
    found = evaluate(
        names, model=model, text=text, num_contexts=contexts, chunk_tokens=chunk_tokens
    )
    click.echo(
        f"{found.what}; chunks of {chunk_tokens} "
        f"tokens\n\n{render(found.rows)}\n\n{render_channels(found.channels)}"
    )
    write_rows(json_file, found.rows)
    if plot is not None:
        draw(
            found.rows,
            plot,
            "Answers right, by how much smaller KV is"
            if text is None
            else "Divergence, by how much smaller KV is",
        )
