from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from kvhold_lab.bench.compare.names import (
    ALONE,
    KVHOLD,
    LIMIT,
    LMCACHE,
    OFFLOADING,
    RECOMPUTE,
    SYSTEMS,
    WITH_TIERS,
)
from kvhold_lab.bench.compare.rows import SystemRow
from kvhold_lab.bench.rows import needing

_COMPARED = (KVHOLD, ALONE)
_COLORS = {RECOMPUTE: "#9aa5b1", OFFLOADING: "#c44536", KVHOLD: "#2a9d8f", LIMIT: "#222222"}
_CELL = 23
_LABEL = max(map(len, SYSTEMS)) + len(" to the best")


def render(rows: Sequence[SystemRow]) -> str:
    blocks = [
        _block(tier, workload, list(of_block))
        for (tier, workload), of_block in groupby(rows, lambda row: (row.tier, row.workload))
    ]
    return "\n\n".join([*blocks, *_errors(rows)])


def draw(rows: Sequence[SystemRow], path: Path, title: str) -> None:
    """Raises ConfigError."""
    with needing("'kvhold[lab]'"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    for name in SYSTEMS:
        reuse = [row.reuse for row in rows if row.system == name]
        times = [row.ttft_p50_s for row in rows if row.system == name and row.ttft_p50_s]
        if name not in _COLORS or not times:
            continue
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


def _block(tier: str, workload: str, rows: Sequence[SystemRow]) -> str:
    shares = list(dict.fromkeys(row.reuse for row in rows))
    lines = [
        f"{tier}, {workload}: TTFT p50, and tokens a second of two together",
        _line("", [f"{reuse} %" for reuse in shares]),
    ]
    by_place = {(row.system, row.reuse): row for row in rows}
    names = [name for name in SYSTEMS if any(row.system == name for row in rows)]
    lines += [
        _line(name, [_times(by_place.get((name, reuse))) for reuse in shares]) for name in names
    ]
    for name in _COMPARED:
        compared = [by_place.get((name, reuse)) for reuse in shares]
        if any(compared):
            lines.append(_line(f"{name} to the best", [_ratio(row) for row in compared]))
            lines.append(_line("", [row.best_peer if row else "" for row in compared]))
            lines.append(_line(f"{name} not computed", [_not_computed(row) for row in compared]))
    for name in _COMPARED:
        found: dict[str, int] = {}
        for row in rows:
            for source, tokens in row.sources.items() if row.system == name else ():
                found[source] = found.get(source, 0) + tokens
        if found:
            by_source = (
                f"{tokens:,} tokens in {source}" for source, tokens in sorted(found.items())
            )
            lines.append(f"{name} found {', '.join(by_source)}")
    for name in (OFFLOADING, LMCACHE):
        whole = by_place.get((name, 100))
        if whole is not None and not whole.error and not whole.cached_tokens:
            lines.append(
                f"{name} reused nothing of at least one prompt that it had seen whole: it "
                "is no peer here"
            )
    return "\n".join(lines)


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL}}{''.join(f'{cell:>{_CELL}}' for cell in cells)}".rstrip()


def _times(row: SystemRow | None) -> str:
    if row is None:
        return "-"
    if row.ttft_p50_s is None:
        return "FAILED"
    rate = f"{row.throughput:6.0f}/s" if row.throughput is not None else f"{'-':>8}"
    return f"{row.ttft_p50_s:.3f} s {rate}"


def _ratio(row: SystemRow | None) -> str:
    if row is None or row.ratio_to_best_peer is None or row.interval is None:
        return "-"
    return f"{row.ratio_to_best_peer:.3f} ({row.interval[0]:.3f}-{row.interval[1]:.3f})"


def _not_computed(row: SystemRow | None) -> str:
    return "-" if row is None or row.cached_tokens is None else f"{row.cached_tokens:,} tokens"


def _errors(rows: Sequence[SystemRow]) -> list[str]:
    named = [
        (f"{row.system} ({row.tier})" if row.system in WITH_TIERS else row.system, row.error)
        for row in rows
        if row.error
    ]
    return [f"{name}: FAILED: {error}" for name, error in dict.fromkeys(named)]
