import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhold.cli.options import Size, json_option
from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold.core.layout import Group
from kvhold.core.sizes import format_size, parse_size
from kvhold.sizing.fits import RATIOS, Fit, fits, is_measured
from kvhold.sizing.model import ModelKV, kv_of, read_settings
from kvhold.tiers.url import parse_url


@click.command()
@click.argument("model")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="Type of the KV: bf16, fp16, fp32, fp8, int8 ... [auto: the model's]",
)
@click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel workers."
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=32_768,
    show_default=True,
    help="Length of the prompt.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Tokens in a chunk.",
)
@click.option("--ram", type=Size(), help="Memory, such as 64GiB: how many tokens fit.")
@click.option(
    "--disk", type=Size(), help="A tier below memory, such as 1TiB: how many tokens fit, by codec."
)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    type=click.Choice(list(RATIOS)),
    help="Only these codecs. [default: all]",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Settings file whose memory and tiers are shown, too.",
)
@json_option
def command(
    model: str,
    dtype: str,
    tp: int,
    tokens: int,
    chunk_tokens: int,
    ram: int | None,
    disk: int | None,
    codecs: tuple[str, ...],
    config: Path | None,
    as_json: bool,
) -> None:
    """Show the size of MODEL's KV, and how many tokens fit into memory and tiers.

    MODEL is a well-known name such as meta-llama/Llama-3.1-8B, a folder with a config.json, or a
    config.json. Nothing is downloaded.
    """
    kv = kv_of(read_settings(model), dtype=dtype)
    chunk_bytes, element = kv.stored_bytes(chunk_tokens), kv.groups[0].dtype
    below = codecs or tuple(codec for codec in RATIOS if is_measured(codec, element))
    configured, notes = _of_settings(config, element) if config is not None else ([], [])
    places = [("ram", ram, ("raw",)), ("disk", disk, below), *configured]
    rows = [
        row
        for name, limit, names in places
        if limit
        for row in fits(name, limit, chunk_bytes, chunk_tokens, element, names)
    ]
    result = {
        "model": model,
        "dtype": element,
        "tp": tp,
        "groups": [
            {
                name: getattr(group, name)
                for name in ("layers", "planes", "heads", "head_dim", "window")
            }
            for group in kv.groups
        ],
        "state_layers": kv.state_layers,
        "notes": [*kv.notes, *notes],
        "token_bytes": kv.stored_bytes(1),
        "chunk_tokens": chunk_tokens,
        "chunk_bytes": chunk_bytes,
        "prompt_tokens": tokens,
        "prompt_bytes": kv.stored_bytes(tokens),
        "prompt_hit_bytes": kv.kept_bytes(tokens),
        "rank_token_bytes": kv.rank_bytes(1, tp),
        "rank_prompt_bytes": kv.rank_bytes(tokens, tp),
        "fits": [asdict(row) for row in rows],
    }
    click.echo(json.dumps(result, indent=2) if as_json else _describe(kv, result, rows))


def _of_settings(
    file: Path, element: str
) -> tuple[list[tuple[str, int | None, Sequence[str]]], list[str]]:
    """An unmeasured codec counts as raw."""
    config = load_config({}, file=file, environ={})
    places: list[tuple[str, int | None, Sequence[str]]] = [("ram", config.ram_bytes, ("raw",))]
    notes = []
    for text in config.tiers:
        url = parse_url(text)
        limit, codec = url.options.get("max_bytes"), url.options.get("codec", "raw")
        if limit is None:
            continue
        if not is_measured(codec, element):
            notes.append(
                f"{url.shown}: the ratio of {codec} on {element} KV was not measured; it is "
                "counted as raw"
            )
            codec = "raw"
        try:
            places.append((url.shown, parse_size(limit), (codec,)))
        except ValueError as error:
            raise ConfigError(f"{url.shown}: max_bytes: {error}") from None
    return places, notes


def _describe(kv: ModelKV, result: dict[str, Any], rows: Sequence[Fit]) -> str:
    tokens, tp = result["prompt_tokens"], result["tp"]
    lines = [
        f"{result['model']}, {result['dtype']}",
        *(f"  {_of_group(group)}" for group in kv.groups),
    ]
    lines += [f"  note: {note}" for note in result["notes"]]
    heading = f"{'':24}{'stored by kvhold':>24}{'loaded by a hit':>24}" + (
        f"{f'one of {tp} workers':>24}" if tp > 1 else ""
    )
    lines += ["", heading]
    for name, count in (
        ("a token", 1),
        (f"a chunk of {result['chunk_tokens']:,}", result["chunk_tokens"]),
        (f"a prompt of {tokens:,}", tokens),
    ):
        sizes = [
            kv.stored_bytes(count),
            kv.kept_bytes(count),
            *([kv.rank_bytes(count, tp)] if tp > 1 else []),
        ]
        lines.append(
            f"{name:24}"
            + "".join(
                f"{f'{nbytes:,} B':>24}" if count == 1 else f"{format_size(nbytes):>24}"
                for nbytes in sizes
            )
        )
    if rows:
        width = max(len(row.place) for row in rows)
        lines += [
            "",
            f"{'place':{width}}  {'size':>10}  {'codec':14}  {'ratio':>6}  {'tokens':>16}  prompts",
        ]
        for row in rows:
            fitting = f"{row.tokens:>16,}  {row.tokens / tokens:,.1f}"
            lines.append(
                f"{row.place:{width}}  {format_size(row.size_bytes):>10}  {row.codec:14}  "
                f"{row.ratio:6.3f}  {fitting}"
            )
        if any(row.codec != "raw" for row in rows):
            lines.append(
                "ratios are those of a small trained model (docs/quality.md); measure "
                "yours with kvhold bench quality --model"
            )
    return "\n".join(lines)


def _of_group(group: Group) -> str:
    what = (
        f"K and V, {group.heads} heads of {group.head_dim}"
        if group.planes == 2
        else f"one latent of {group.head_dim} (MLA)"
    )
    where = f"the last {group.window:,} tokens" if group.window else "all tokens"
    return f"{group.layers} layers see {where}: {what}"
