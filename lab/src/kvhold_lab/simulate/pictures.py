"""python -m kvhold_lab.simulate.pictures PICTURE ROWS.json [ROWS.json ...]"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvhold.core.errors import ConfigError
from kvhold.core.sizes import format_size
from kvhold_lab.bench.rows import needing
from kvhold_lab.options import PICTURES, OutputFile
from kvhold_lab.simulate.report import label

if TYPE_CHECKING:  # its import loads a compiler
    from kvhold_lab.simulate.simulation import SimulatedRow

_COLUMNS = 3
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


class DrawnRow(msgspec.Struct, frozen=True):
    policy: str
    policy_for: str
    capacity_bytes: int
    disk_bytes: int
    chunk_tokens: int
    codec: str
    hit_rate: float


def draw(rows: "Sequence[SimulatedRow | DrawnRow]", path: Path, title: str) -> None:
    """Dashed lines: with a tier below memory."""
    with needing("'kvhold[lab]'"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    _draw_lines(axes, rows)
    axes.set_xlabel("memory, GiB")
    axes.set_ylabel("tokens found, %")
    axes.set_title(title)
    axes.legend(frameon=False)
    _save(figure, path)


def draw_panels(panels: Mapping[str, Sequence[DrawnRow]], path: Path) -> None:
    with needing("'kvhold[lab]'"):
        from matplotlib.figure import Figure
    num_rows = -(-(len(panels) + 1) // _COLUMNS)
    figure = Figure(figsize=(9, 2.6 * num_rows), layout="constrained")
    places = figure.subplots(num_rows, _COLUMNS, squeeze=False).flatten()
    for axes, (title, rows) in zip(places, panels.items(), strict=False):
        _draw_lines(axes, rows)
        axes.set_title(title, fontsize=10)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    lines, names = places[0].get_legend_handles_labels()
    places[-1].legend(lines, names, loc="center", frameon=False)
    figure.supxlabel("memory, GiB", fontsize=10)
    figure.supylabel("tokens found, %", fontsize=10)
    _save(figure, path)


def read_rows(path: Path) -> list[DrawnRow]:
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[DrawnRow])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: not an output of kvhold simulate --json: {error}; write the file again"
        ) from None
    if not rows:
        raise ConfigError(f"{path}: the file has no rows; name a file of kvhold simulate --json")
    return rows


def _draw_lines(axes: Any, rows: "Sequence[SimulatedRow | DrawnRow]") -> None:
    several = len({row.chunk_tokens for row in rows}) > 1
    lines: dict[tuple[str, str, int, int, str], list[SimulatedRow | DrawnRow]] = {}
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
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvhold"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


@click.command()
@click.argument("picture", type=OutputFile(*PICTURES))
@click.argument(
    "files",
    metavar="ROWS.json...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
def main(picture: Path, files: tuple[Path, ...]) -> None:
    """Draw a panel for each file, named after it."""
    try:
        draw_panels({file.stem: read_rows(file) for file in files}, picture)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
