import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhold.core.sizes import format_size
from kvhold_lab.demo.run import DemoResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR_COLUMNS = 40
_ENGINE_NAMES = {"vllm": "vLLM", "transformers": "transformers"}


@dataclass(frozen=True)
class _Row:
    label: str
    ttft_s: float | None


def render(result: DemoResult) -> str:
    rows = _rows(result)
    cold_s = statistics.median(result.timings.cold)
    width = max(len(row.label) for row in rows)
    engine = _ENGINE_NAMES[result.driver]
    what = (
        f"{result.prompt_tokens:,}-token prompt, {result.model.num_parameters / 1e6:.0f}M "
        f"parameters, {engine} on CPU"
    )
    lines = [f"Time to first token (TTFT): {what}, median of {len(result.timings.cold)}", ""]
    for row in rows:
        if row.ttft_s is None:
            lines.append(f"  {row.label:<{width}}  {engine} has none")
            continue
        share = row.ttft_s / cold_s
        bar = "█" * max(1, round(share * _BAR_COLUMNS))
        lines.append(f"  {row.label:<{width}}  {row.ttft_s:7.3f} s  {share:6.1%}  {bar}")
    lines += [
        "",
        f"  tokens reused      {result.tokens_reused:,} of {result.prompt_tokens:,}",
        f"  bytes moved        {format_size(result.bytes_loaded)} from kvhold into the new engine",
        f"  outputs identical  {'yes' if result.identical else 'NO'}",
    ]
    return "\n".join(lines)


def draw(result: DemoResult, path: Path) -> None:
    """Raises ClickException without matplotlib."""
    rows = [row for row in reversed(_rows(result)) if row.ttft_s is not None]
    figure = make_figure(9, 3.2)
    axes = figure.subplots()
    times = [row.ttft_s or 0.0 for row in rows]
    bars = axes.barh(
        [row.label for row in rows],
        times,
        color=["#9aa5b1", "#2a9d8f", "#2a9d8f", "#c44536"][-len(rows) :],
    )
    axes.bar_label(bars, labels=[f"{seconds:.3f} s" for seconds in times], padding=4)
    axes.set_xlim(0, 1.15 * max(times))
    axes.set_xlabel("time to first token, seconds")
    axes.set_title(
        f"{result.prompt_tokens:,}-token prompt, {result.model.num_parameters / 1e6:.0f}M "
        f"parameters, {_ENGINE_NAMES[result.driver]} on CPU"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def make_figure(width: float, height: float) -> "Figure":
    """Size in inches. Raises ClickException without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException(
            "a picture needs matplotlib: pip install 'kvhold[lab]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _rows(result: DemoResult) -> list[_Row]:
    timings = result.timings
    return [
        _Row("cold: nothing cached", statistics.median(timings.cold)),
        _Row("hit, same engine (KV from kvhold)", statistics.median(timings.hit_same)),
        _Row("hit, new engine process (KV from kvhold)", statistics.median(timings.hit_new)),
        _Row(
            "limit: the engine's own prefix cache",
            statistics.median(timings.prefix_cache) if timings.prefix_cache else None,
        ),
    ]
