import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from kvhold.blend.permits import Permit, Permits
from kvhold.blend.selection import (
    SELECTORS,
    Selector,
    make_selector,
    parse_selector,
    selector_of,
    selector_text,
)
from kvhold.core.blend_config import BlendConfig
from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold_lab.bench.rows import machine_and_load, needing, write_rows
from kvhold_lab.interruption import ending_in_order
from kvhold_lab.options import default_option, json_option, tokens_option
from kvhold_lab.verify.json_option import JsonObject

_RATIOS = (0.05, 0.1, 0.15, 0.19)
_PROMPTS = 400


@click.command()
@click.argument("model", required=False)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines: {"documents": ["..."], "question": "...", "answers": ["..."], "before": '
    '"..."}; answers and before may be left out. [default: texts made here]',
)
@click.option(
    "--selector",
    "selectors",
    multiple=True,
    help=f"One of {', '.join(SELECTORS)}, all, or a text such as 'query ratio=0.1'. "
    "[default: blend.selector, or all]",
)
@click.option(
    "--ratio",
    "ratios",
    multiple=True,
    type=click.FloatRange(0, 1),
    help=f"Share of the documents' tokens to recompute. [default: {', '.join(map(str, _RATIOS))}]",
)
@click.option("--prompts", type=click.IntRange(1), help="Prompts. [default: all, or 400 made here]")
@tokens_option(least=128, text=" Only of the lab's retrieval language.")
@default_option("--max-tokens", 16, "Most tokens of an answer.")
@click.option("--model-id", default="", help="Name that Reuse or vLLM's settings give the model.")
@click.option("--dtype", default="float32", show_default=True, help="Type of the model.")
@click.option(
    "--config",
    "settings",
    type=JsonObject(),
    default={},
    help='kvhold\'s settings, such as {"blend": {"max_f1_loss": 0.02}}.',
)
@json_option()
def command(
    model: str | None,
    data: Path | None,
    selectors: tuple[str, ...],
    ratios: tuple[float, ...],
    prompts: int | None,
    tokens: int,
    max_tokens: int,
    model_id: str,
    dtype: str,
    settings: dict[str, Any],
    json_file: Path | None,
) -> None:
    """Measure MODEL's answers with and without blend, and write permits.

    A permit is for one selector whose F1 falls by less than blend.max_f1_loss, at 95 % confidence.
    Without MODEL, a small one is trained here. Exits with 1 without a permit.
    """
    config = load_config(settings).blend
    chosen = _chosen(selectors, ratios, config)
    with needing("'kvhold[transformers]'"):
        from kvhold_lab.verify.blend.measure import measure
        from kvhold_lab.verify.blend.model import load, names_in_permits
        from kvhold_lab.verify.blend.questions import made_questions, read_questions
    with ending_in_order():
        loaded = load(model, dtype=dtype, limit=max_tokens)
        if data is not None:
            name, questions = data.name, read_questions(data, loaded.speech, prompts)
        else:
            name, questions = made_questions(loaded.speech, prompts or _PROMPTS, num_tokens=tokens)
        permits, names = Permits.of(config), names_in_permits(loaded, model_id)
        click.echo(f"{machine_and_load()}; {len(questions)} prompts of {name}\n")
        rows = []
        for row in measure(
            loaded.blender,
            loaded.speech,
            questions,
            chosen,
            config,
            model=loaded.name,
            data=name,
            say=click.echo,
        ):
            rows.append(row)
            write_rows(json_file, rows)
    click.echo(_table(rows))
    for row in rows:
        if row.reason:
            _refuse(row, permits, names)
        else:
            paths = [permits.grant(row.permit(one, config)) for one in names]
            click.echo(f"permitted: {row.selector}: {', '.join(map(str, paths))}")
    if all(row.reason for row in rows):
        click.echo("kvhold verify: no permit", err=True)
        sys.exit(1)


def _table(rows: Sequence[Any]) -> str:
    titles = (
        f"{'selector':36} {'recomputed':>10} {'F1':>6} {'in full':>7} {'change, points':>16} "
        f"{'exact':>6} {'in full':>7} {'KL':>9} {'top 1':>6}"
    )
    lines = [titles]
    for row in rows:
        change = f"{100 * row.f1_low:+.2f} to {100 * row.f1_high:+.2f}"
        lines.append(
            f"{row.selector:36} {row.recomputed:10.1%} {row.f1:6.3f} {row.f1_full:7.3f} "
            f"{change:>16} {row.exact_match:6.3f} {row.exact_match_full:7.3f} {row.kl:9.2e} "
            f"{row.agreement:6.3f}"
        )
    return "\n".join([*lines, ""])


def _refuse(row: Any, permits: Permits, names: Sequence[str]) -> None:
    helps = f"some {row.prompts_needed} prompts like these suffice"
    if not row.prompts_needed:
        helps = (
            "worse with 95 % confidence"
            if row.is_worse
            else "more prompts like these would not help"
        )
    click.echo(f"not permitted: {row.selector}: {row.reason}; {helps}")
    for one in names if row.is_worse else ():
        if isinstance(found := permits.find(one, row.selector), Permit):
            permits.withdraw(found, f"kvhold verify: {row.reason}")
            click.echo(f"withdrawn: the permit of {found.granted}")


def _chosen(
    names: Sequence[str], ratios: Sequence[float], config: BlendConfig
) -> dict[str, Selector]:
    """By their texts. Raises ConfigError."""
    configured = selector_of(config)
    if not names and configured is not None:
        if ratios:
            raise ConfigError("--ratio needs --selector: blend.selector is set")
        return {selector_text(configured): configured}
    found: list[Selector] = []
    for name in chain.from_iterable(SELECTORS if n == "all" else (n,) for n in names or ("all",)):
        if name == "none" or len(name.split()) > 1:
            found.append(parse_selector(name))
        else:
            found += [
                make_selector(name, ratio=ratio, check_layer=config.check_layer)
                for ratio in ratios or _RATIOS
            ]
    return {selector_text(selector): selector for selector in found}
