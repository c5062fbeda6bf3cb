"""Rows as text and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhold.core.sizes import format_size

if TYPE_CHECKING:  # its import loads a compiler
    from kvhold_lab.simulate.simulation import SimulatedRow

HEADING = (
    f"{'policy':13} {'memory':>10} {'below':>10} {'codec':>12} {'tokens':>8} {'memory':>8} "
    f"{'below':>8} {'requests':>9} {'saved':>10} "
    f"{'read':>10} {'stored':>10} {'evicted':>10} {'M chunks/s':>10}"
)

_COLORS = {
    "lru": "#2a9d8f",
    "lfu": "#e9a23b",
    "fifo": "#9aa5b1",
    "mru": "#7b5ea7",
    "s3fifo": "#3a6ea5",
    "learned": "#d4679a",
    "arc": "#c44536",
    "belady": "#222222",
}
_MARKERS = {"ttft": "s", "bytes": "^"}


@dataclass(frozen=True)
class Checked:
    """same: equal hits for every request."""

    policy: str
    ram_bytes: int
    disk_bytes: int
    simulated: float
    served: float
    same: bool


def line(row: "SimulatedRow") -> str:
    sizes = [
        format_size(size) if size else "-"
        for size in (row.capacity_bytes, row.disk_bytes, row.bytes_read, row.bytes_written)
    ]
    codec = row.codec if row.disk_bytes else "-"
    rates = (
        f"{row.hit_rate:8.2%} {row.ram_hit_rate:8.2%} {row.disk_hit_rate:8.2%} "
        f"{row.request_hit_rate:9.2%} {f'{row.saved_s:,.0f} s':>10}"
    )
    moved = (
        f"{sizes[2]:>10} {sizes[3]:>10} {row.evictions + row.disk_evictions:10,} "
        f"{row.events_per_s / 1e6:10.2f}"
    )
    name = label(row.policy, row.policy_for)
    return f"{name:13} {sizes[0]:>10} {sizes[1]:>10} {codec:>12} {rates} {moved}"


def label(policy: str, policy_for: str) -> str:
    """Return the name of a policy or class; `tokens` is not mentioned."""
    name = policy.rpartition(":")[2]
    return name if policy_for in ("", "tokens") else f"{name} {policy_for}"


def render_check(checked: Sequence[Checked]) -> str:
    lines = [
        (
            f"{'policy':13} {'memory':>10} {'below':>10} {'simulated':>10} {'real cache':>11} "
            f"{'points apart':>13}  each request"
        )
    ]
    for one in checked:
        below = format_size(one.disk_bytes) if one.disk_bytes else "-"
        apart = 100 * abs(one.simulated - one.served)
        rates = f"{one.simulated:10.2%} {one.served:11.2%} {apart:13.3f}"
        lines.append(
            f"{one.policy:13} {format_size(one.ram_bytes):>10} {below:>10} {rates}  "
            f"{'the same' if one.same else 'differs'}"
        )
    return "\n".join(lines)


def draw(rows: Sequence["SimulatedRow"], path: Path, title: str) -> None:
    """Hit rate over memory as PNG, SVG or PDF; dashed lines have a lower tier.

    Raises ClickException without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException(
            "a picture needs matplotlib: pip install 'kvhold[lab]'"
        ) from None
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    several = len({row.chunk_tokens for row in rows}) > 1
    lines: dict[tuple[str, str, int, int, str], list[SimulatedRow]] = {}
    for row in rows:
        codec = row.codec if row.disk_bytes else ""
        lines.setdefault(
            (row.policy, row.policy_for, row.chunk_tokens, row.disk_bytes, codec), []
        ).append(row)
    for (policy, policy_for, tokens, disk, codec), own in lines.items():
        own.sort(key=lambda row: row.capacity_bytes)
        below = f" + {format_size(disk)} {codec}" if disk else ""
        axes.plot(
            [row.capacity_bytes / 2**30 for row in own],
            [100 * row.hit_rate for row in own],
            marker=_MARKERS.get(policy_for, "o"),
            markersize=4,
            color=_COLORS.get(policy),
            linestyle="--" if disk else "-",
            label=f"{label(policy, policy_for)}{f', chunks of {tokens}' if several else ''}{below}",
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("memory, GiB")
    axes.set_ylabel("tokens found, %")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    # keeps text as text, and the bytes reproducible
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvhold"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
