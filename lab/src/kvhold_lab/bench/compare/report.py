"""Shows the rows: a block for each tier and working set, a line for each system."""

from collections.abc import Sequence
from itertools import groupby

from kvhold_lab.bench.compare.rows import SystemRow
from kvhold_lab.bench.compare.systems import ALONE, KVHOLD, LMCACHE, OFFLOADING, SYSTEMS, WITH_TIERS

_COMPARED = (KVHOLD, ALONE)
_CELL = 23
_LABEL = max(map(len, SYSTEMS)) + len(" to the best")


def render(rows: Sequence[SystemRow]) -> str:
    blocks = [
        _block(tier, workload, list(of_block))
        for (tier, workload), of_block in groupby(rows, lambda row: (row.tier, row.workload))
    ]
    return "\n\n".join([*blocks, *_errors(rows)])


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


def _errors(rows: Sequence[SystemRow]) -> list[str]:
    named = [
        (f"{row.system} ({row.tier})" if row.system in WITH_TIERS else row.system, row.error)
        for row in rows
        if row.error
    ]
    return [f"{name}: FAILED: {error}" for name, error in dict.fromkeys(named)]
