from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhold_lab.bench.compare.names import (
    AGAIN,
    ALONE,
    COPIES,
    KVHOLD,
    LIMIT,
    SYSTEMS,
    is_ours,
    key,
)
from kvhold_lab.bench.compare.run import CompareMeasurement
from kvhold_lab.bench.ratios import Cell, Ratio, rates_of, ratio, seconds_of, shared

_CONTROLS = (AGAIN, LIMIT, *COPIES)


@dataclass(frozen=True)
class SystemRow:
    """None: not measured, see `error`.

    throughput: tokens a second, in bursts
    ratio_to_best_peer: of TTFT
    interval: 95 %
    cached_tokens: of the shortest hit
    """

    workload: str
    tier: str
    reuse: int
    system: str
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    throughput: float | None = None
    ratio_to_best_peer: float | None = None
    best_peer: str = ""
    interval: tuple[float, float] | None = None
    requests: int = 0
    cached_tokens: int | None = None
    sources: dict[str, int] = field(default_factory=dict)
    error: str = ""
    ttft_ratios: dict[str, Ratio] = field(default_factory=dict)
    throughput_ratios: dict[str, Ratio] = field(default_factory=dict)
    cpu_ratios: dict[str, Ratio] = field(default_factory=dict)


def make_rows(measured: CompareMeasurement, tiers: Sequence[str]) -> list[SystemRow]:
    return [
        row
        for tier in tiers
        for workload in dict.fromkeys(workload for workload, _ in measured.cells)
        for reuse in sorted(
            reuse for of_workload, reuse in measured.cells if of_workload == workload
        )
        for row in _rows(measured, workload, tier, reuse, measured.cells[workload, reuse])
    ]


def _rows(
    measured: CompareMeasurement, workload: str, tier: str, reuse: int, cells: Sequence[Cell]
) -> Iterator[SystemRow]:
    alone, bursts = split(cells)
    keys = {name: key(name, tier) for name in SYSTEMS if tier == "ram" or name not in COPIES}
    there = {name: of_name for name, of_name in keys.items() if seconds_of(alone, of_name)}
    medians = {
        name: float(np.median(seconds_of(alone, of_name))) for name, of_name in there.items()
    }
    for name, of_name in keys.items():
        error = measured.errors.get(of_name, "")
        if name not in there:
            if error:
                yield SystemRow(workload, tier, reuse, name, error=error)
            continue
        others = {other: there[other] for other in there if other != name}
        ttft_ratios = {
            other: ratio(alone, of_name, of_other)
            for other, of_other in others.items()
            if shared(alone, of_name, of_other)
        }
        best = min(peers(name, ttft_ratios), key=medians.__getitem__, default="")
        both = {
            other: of_other
            for other, of_other in others.items()
            if shared(bursts, of_name, of_other)
        }
        rates = rates_of(bursts, of_name)
        yield SystemRow(
            workload,
            tier,
            reuse,
            name,
            ttft_p50_s=medians[name],
            ttft_p99_s=float(np.percentile(seconds_of(alone, of_name), 99)),
            throughput=float(np.median(rates)) if rates else None,
            ratio_to_best_peer=ttft_ratios[best].median if best else None,
            best_peer=best,
            interval=(ttft_ratios[best].low, ttft_ratios[best].high) if best else None,
            requests=len(seconds_of(alone, of_name)),
            cached_tokens=min(
                cell.cached_tokens[of_name] for cell in alone if of_name in cell.seconds
            ),
            sources=measured.sources.get(((workload, reuse), of_name), {})
            if name not in COPIES
            else {},
            error=error,
            ttft_ratios=ttft_ratios,
            throughput_ratios={
                other: ratio(bursts, of_other, of_name) for other, of_other in both.items()
            },
            cpu_ratios={
                other: ratio(bursts, of_name, of_other, "cpu_s") for other, of_other in both.items()
            },
        )


def peers(name: str, others: dict[str, Ratio]) -> list[str]:
    own = (KVHOLD, ALONE) if name in (KVHOLD, ALONE) else (name,)
    return [other for other in others if other not in own and other not in _CONTROLS]


def split(cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    return [cell for cell in cells if not cell.burst], [cell for cell in cells if cell.burst]


def failed(
    rows: Sequence[SystemRow], *, most_reuse: int = 100, strict: bool = False
) -> list[SystemRow]:
    return [
        row
        for row in rows
        if is_ours(row.system)
        and (
            row.error
            or (
                row.reuse == most_reuse > 0
                and not (row.cached_tokens or (row.sources and not strict))
            )
        )
    ]
