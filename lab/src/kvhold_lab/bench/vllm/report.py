"""Shows the rows as a table, and the curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

import click

from kvhold_lab.bench.vllm.figures import VllmRow
from kvhold_lab.bench.vllm.systems import (
    AGAIN,
    KVHOLD,
    LIMIT,
    OFFLOADING,
    PLAIN,
    RECOMPUTE,
    SYSTEMS,
)

_COLORS = {
    RECOMPUTE: "#9aa5b1",
    PLAIN: "#6c7a89",
    AGAIN: "#6c7a89",
    OFFLOADING: "#c44536",
    KVHOLD: "#2a9d8f",
    LIMIT: "#222222",
}


def render(rows: Sequence[VllmRow]) -> str:
    width = max(len(name) for name in SYSTEMS)
    lines = [
        (
            f"reuse  {'system':<{width}}  TTFT p50   TTFT p99  tokens/s  not computed  to the "
            "best other, 95 % interval"
        )
    ]
    for number, row in enumerate(rows):
        if number and row.reuse != rows[number - 1].reuse:
            lines.append("")
        best = row.ttft_ratios[row.best_peer]
        rate = f"{row.throughput:8.0f}" if row.throughput is not None else f"{'-':>8}"
        lines.append(
            f"{row.reuse:4} %  {row.system:<{width}}  {row.ttft_p50_s:6.3f} s  "
            f"{row.ttft_p99_s:7.3f} s  {rate}  {row.cached_tokens:12}"
            f"  {best.median:6.3f} ({best.low:.3f}-{best.high:.3f}) of {row.best_peer}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[VllmRow], path: Path, title: str) -> None:
    """Draw TTFT over reuse (PNG, SVG or PDF, by the path's ending).

    Raises ClickException without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException(
            "a picture needs matplotlib: pip install 'kvhold[lab]'"
        ) from None
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    for name in SYSTEMS:
        own = [row for row in rows if row.system == name]
        if name not in _COLORS or name in (PLAIN, AGAIN) or not own:
            continue
        reuse, times = [row.reuse for row in own], [row.ttft_p50_s for row in own]
        axes.plot(
            reuse,
            times,
            marker="o",
            color=_COLORS[name],
            linestyle="--" if name == LIMIT else "-",
            label=name,
        )
        if name in (KVHOLD, LIMIT):
            axes.annotate(
                f"{times[-1]:.3f} s",
                (reuse[-1], times[-1]),
                xytext=(8, 6 if name == KVHOLD else -8),
                textcoords="offset points",
                color=_COLORS[name],
            )
    axes.set_xlim(-2, 112)
    axes.set_ylim(bottom=0)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("share of the prompt that was seen before, %")
    axes.set_ylabel("time to first token, seconds (median)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
