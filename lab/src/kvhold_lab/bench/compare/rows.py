"""From cells to rows: medians, and ratios within cells. No I/O."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhold_lab.bench.compare.run import CompareMeasurement
from kvhold_lab.bench.compare.systems import (
    AGAIN,
    KVHOLD,
    LEFT_AGAIN,
    LEFT_ALONE,
    OURS,
    PLAIN,
    SYSTEMS,
    key,
)
from kvhold_lab.bench.ratios import Cell, Goal, Ratio, rates_of, ratio, seconds_of, shared

# copies of others, for the noise
_CONTROLS = (AGAIN, LEFT_ALONE, LEFT_AGAIN)
_MOST_COST = 1.02
_REUSED_WELL = 50


@dataclass(frozen=True)
class SystemRow:
    """One system in one cell. None: not measured, see `error`.

    throughput: tokens of prompts and outputs a second, in bursts
    ratio_to_best_peer: of TTFT; kvhold's systems and copies are no peers
    interval: of that ratio, 95 %
    cached_tokens: of the shortest hit
    sources: tokens that the node found, by tier
    ttft_ratios, throughput_ratios, cpu_ratios: to each other system
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


def goals(measured: CompareMeasurement, rows: Sequence[SystemRow]) -> list[Goal]:
    """Return kvhold's goals: cost without reuse, TTFT from half reuse on."""
    found = []
    unused = [cell for (_, reuse), cells in measured.cells.items() if not reuse for cell in cells]
    alone, bursts = _split(unused)
    noise = {"TTFT": _noise(alone, AGAIN, PLAIN), "time": _noise(bursts, AGAIN, PLAIN)}
    within = {
        "TTFT": _noise(alone, LEFT_AGAIN, LEFT_ALONE),
        "time": _noise(bursts, LEFT_AGAIN, LEFT_ALONE),
    }
    for tier in dict.fromkeys(row.tier for row in rows):
        ours = key(KVHOLD, tier)
        for what, cells in (("TTFT", alone), ("time", bursts)):
            named = f"{tier}, no reuse: {what if what == 'TTFT' else 'time for the same work'} over"
            if shared(cells, ours, PLAIN):
                found.append(
                    Goal(
                        f"{named} vLLM's without a connector",
                        ratio(cells, ours, PLAIN),
                        _MOST_COST,
                        noise[what],
                    )
                )
            if tier == "ram" and shared(cells, ours, LEFT_ALONE):
                beside = f"{named} that of requests left alone, in one engine"
                found.append(Goal(beside, ratio(cells, ours, LEFT_ALONE), _MOST_COST, within[what]))
    for row in rows:
        if (
            row.system == KVHOLD
            and row.tier == "ram"
            and row.reuse >= _REUSED_WELL
            and row.best_peer
        ):
            worst = max(
                _peers(row.system, row.ttft_ratios), key=lambda name: row.ttft_ratios[name].median
            )
            what = f"ram, {row.workload}, {row.reuse} % reuse: TTFT over the best peer's, {worst}"
            alike, _ = _split(measured.cells[row.workload, row.reuse])
            found.append(Goal(what, row.ttft_ratios[worst], 1.0, _noise(alike, AGAIN, PLAIN)))
    return found


def _rows(
    measured: CompareMeasurement, workload: str, tier: str, reuse: int, cells: Sequence[Cell]
) -> Iterator[SystemRow]:
    alone, bursts = _split(cells)
    keys = {
        name: key(name, tier)
        for name in SYSTEMS
        if tier == "ram" or name not in (LEFT_ALONE, LEFT_AGAIN)
    }
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
        best = min(_peers(name, ttft_ratios), key=medians.__getitem__, default="")
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
            if name not in (LEFT_ALONE, LEFT_AGAIN)
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


def _peers(name: str, others: dict[str, Ratio]) -> list[str]:
    own = OURS if name in OURS else (name,)
    return [other for other in others if other not in own and other not in _CONTROLS]


def _split(cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    return [cell for cell in cells if not cell.burst], [cell for cell in cells if cell.burst]


def _noise(cells: Sequence[Cell], name: str, other: str) -> float:
    """Factor between two equal systems; infinity if unknown."""
    return ratio(cells, name, other).apart if shared(cells, name, other) else math.inf


def failed(rows: Sequence[SystemRow]) -> list[SystemRow]:
    """Return rows where kvhold failed, or reused nothing at full reuse."""
    return [
        row
        for row in rows
        if row.system in OURS
        and (row.error or (row.reuse == 100 and not (row.cached_tokens or row.sources)))
    ]
