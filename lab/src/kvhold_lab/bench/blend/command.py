from pathlib import Path

import click

from kvhold_lab.bench.rows import machine_and_load, needing, write_rows
from kvhold_lab.options import default_option, json_option, only_option, tokens_option


@click.command()
@only_option("--selector", "only", ", by the beginnings of their names")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model of the lab's retrieval language. [default: trained here, once]",
)
@tokens_option(least=128)
@default_option("--prompts", 100, "Prompts, each of five documents and a question.")
@default_option("--rounds", 5, "Rounds of the times.", click.IntRange(5))
@click.option(
    "--engine",
    type=click.Choice(["transformers", "vllm"]),
    default="transformers",
    show_default=True,
    help="vllm: some selectors, and as many rounds as prompts.",
)
@json_option()
def command(
    only: tuple[str, ...],
    model: Path | None,
    tokens: int,
    prompts: int,
    rounds: int,
    engine: str,
    json_file: Path | None,
) -> None:
    """Measure answers and TTFT of prompts whose documents have KV from elsewhere.

    Beside it: full prefill, a prefix cache, keys that are not turned, and no selection. Times are
    medians; the change of F1 is an interval of 95 %.
    """
    with needing("'kvhold[transformers]'"):
        from kvhold_lab.bench.blend.run import load_blender, rows
        from kvhold_lab.bench.blend.vllm_rows import vllm_rows
    found = (
        vllm_rows(model, num_tokens=tokens, num_prompts=prompts, only=only)
        if engine == "vllm"
        else rows(
            load_blender(model), num_tokens=tokens, num_prompts=prompts, rounds=rounds, only=only
        )
    )
    click.echo(f"{machine_and_load()}; {prompts} prompts of {tokens} tokens\n")
    click.echo(
        f"{'selector':14} {'recomputed':>10} {'TTFT s':>7} {'ratio':>6} {'F1':>6} "
        f"{'change, points':>16} {'KL':>9} {'reused':>7}"
    )
    measured = []
    for row in found:
        measured.append(row)
        change = f"{100 * row.f1_low:+.2f} to {100 * row.f1_high:+.2f}"
        click.echo(
            f"{row.selector:14} {row.recomputed:10.1%} {row.ttft_s:7.3f} {row.ttft_ratio:6.3f} "
            f"{row.f1:6.3f} {change:>16} {row.kl:9.2e} {row.reused_tokens:7.0f}"
        )
        write_rows(json_file, measured)
