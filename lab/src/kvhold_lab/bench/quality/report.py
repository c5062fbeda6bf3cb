from collections.abc import Sequence
from pathlib import Path

import click

from kvhold_lab.bench.quality.measure import MeasuredChannels, QualityRow

_LEAST_SPREAD = 0.02

_LABELS = (10, -10, 24, -24)


def render(rows: Sequence[QualityRow]) -> str:
    heading = (
        f"{'codec':16} {'ratio':>6} {'accuracy':>9} {'drop, points':>16} {'KL, nats':>10} "
        f"{'perplexity':>11} {'error':>8}"
    )
    return "\n".join([heading, *(_line(row) for row in rows)])


def render_channels(channels: MeasuredChannels) -> str:
    keys, values = (
        ", ".join(f"{unlike:.1f}" for unlike in plane) for plane in (channels.keys, channels.values)
    )
    return f"largest channel over the median one, layer by layer: keys {keys}; values {values}"


def draw(rows: Sequence[QualityRow], path: Path, title: str) -> None:
    """Raises ClickException."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException(
            "a picture needs matplotlib: pip install 'kvhold[lab]'"
        ) from None
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    by_accuracy = all(row.accuracy is not None for row in rows)
    heights = [
        100 * row.accuracy if row.accuracy is not None and by_accuracy else row.kl for row in rows
    ]
    for number, (row, height) in enumerate(
        sorted(zip(rows, heights, strict=True), key=lambda pair: pair[0].ratio)
    ):
        axes.errorbar(
            [row.ratio],
            [height],
            yerr=row.accuracy_drop_se,
            fmt="o",
            color="#2a9d8f",
            markersize=7,
            capsize=3,
        )
        offset = _LABELS[number % len(_LABELS)]
        side = "bottom" if offset > 0 else "top"
        axes.annotate(
            row.codec,
            (row.ratio, height),
            xytext=(0, offset),
            textcoords="offset points",
            ha="center",
            va=side,
        )
    axes.set_xlabel("plain bytes / bytes of frames")
    axes.set_ylabel("answers right, %" if by_accuracy else "KL from the untouched KV, nats a token")
    low, high = min(heights), max(heights)
    if by_accuracy:
        middle, half = (low + high) / 2, max(high - low, 100 * _LEAST_SPREAD) / 2
        high = min(middle + half, 100.0)
        low = high - 2 * half
    room = 0.15 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)
    if by_accuracy:
        axes.set_yticks([tick for tick in axes.get_yticks() if low - room <= tick <= 100])
    axes.set_xlim(
        left=min(0.8, min(row.ratio for row in rows) - 0.1),
        right=1.08 * max(row.ratio for row in rows),
    )
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvhold"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _line(row: QualityRow) -> str:
    accuracy = "-" if row.accuracy is None else f"{row.accuracy:.4f}"
    drop = (
        "-"
        if row.accuracy_drop is None
        else f"{row.accuracy_drop:7.2f} ± {row.accuracy_drop_se:.2f}"
    )
    return (
        f"{row.codec:16} {row.ratio:6.3f} {accuracy:>9} {drop:>16} {row.kl:10.6f} "
        f"{row.perplexity_ratio:11.5f} {row.error:8.5f}"
    )
