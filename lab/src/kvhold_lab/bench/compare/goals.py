import math
from collections.abc import Iterator, Sequence
from typing import Literal

from kvhold_lab.bench.compare import names
from kvhold_lab.bench.compare.rows import SystemRow, peers, split
from kvhold_lab.bench.compare.run import CompareMeasurement
from kvhold_lab.bench.ratios import Cell, Goal, ratio, shared

_MOST_COST = 1.02
_REUSED_WELL = 50

_Times = Literal["seconds", "cpu_s"]


def visiting_goals(measured: CompareMeasurement, rows: Sequence[SystemRow]) -> list[Goal]:
    found: list[Goal] = []
    for tier in dict.fromkeys(row.tier for row in rows):
        found += _cost(_unused(measured), tier, where=f"{tier}, ", unknown=math.inf)
    for row in rows:
        if (
            row.system == names.KVHOLD
            and row.tier == "ram"
            and row.reuse >= _REUSED_WELL
            and row.best_peer
        ):
            worst = max(
                peers(row.system, row.ttft_ratios), key=lambda name: row.ttft_ratios[name].median
            )
            what = f"ram, {row.workload}, {row.reuse} % reuse: TTFT over the best peer's, {worst}"
            alike, _ = split(measured.cells[row.workload, row.reuse])
            noise = _noise(alike, names.AGAIN, names.PLAIN, unknown=math.inf)
            found.append(Goal(what, row.ttft_ratios[worst], 1.0, noise))
    return found


def repeating_goals(measured: CompareMeasurement, rows: Sequence[SystemRow]) -> list[Goal]:
    unused = _unused(measured)
    found = list(_cost(unused, "ram", cpu=True))
    noise = _noise(split(unused)[0], names.AGAIN, names.PLAIN)
    for row in rows:
        ttft, reuse = row.ttft_ratios, f"{row.reuse} % reuse"
        if row.system == names.LAYERWISE and names.BESIDE in ttft:
            what = f"{reuse}, layer by layer: TTFT over that of loads beside the passes"
            found.append(Goal(what, ttft[names.BESIDE], 1.0))
        if row.system != names.KVHOLD or not row.reuse:
            continue
        if names.OFFLOADING in ttft:
            what = f"{reuse}: TTFT over vLLM's offloading's"
            found.append(Goal(what, ttft[names.OFFLOADING], 1.0, noise))
        if row.reuse == 100 and names.LIMIT in ttft:
            what = "full hit: TTFT over that of vLLM's own prefix cache"
            found.append(Goal(what, ttft[names.LIMIT], 1.1, noise))
        if row.reuse == 100 and names.UNCHECKED in ttft:
            what = "full hit: TTFT over that without comparing checksums"
            cells = split(measured.cells[row.workload, row.reuse])[0]
            noise = _noise(cells, names.CHECKED_AGAIN, names.key(names.KVHOLD, row.tier))
            found.append(Goal(what, ttft[names.UNCHECKED], 1.03, noise))
    return found


def _cost(
    unused: Sequence[Cell], tier: str, *, where: str = "", unknown: float = 1.0, cpu: bool = False
) -> Iterator[Goal]:
    ours = names.key(names.KVHOLD, tier)
    alone, bursts = split(unused)
    kinds: list[tuple[str, list[Cell], _Times]] = [
        ("TTFT", alone, "seconds"),
        ("time for the same work", bursts, "seconds"),
    ]
    if cpu:
        kinds.append(("CPU time for the same work", bursts, "cpu_s"))
    for what, cells, times in kinds:
        what = f"{where}no reuse: {what} over"
        if shared(cells, ours, names.PLAIN):
            noise = _noise(cells, names.AGAIN, names.PLAIN, times, unknown=unknown)
            beside = f"{what} vLLM's without a connector"
            yield Goal(beside, ratio(cells, ours, names.PLAIN, times), _MOST_COST, noise)
        if tier == "ram" and times == "seconds" and shared(cells, ours, names.LEFT_ALONE):
            noise = _noise(cells, names.LEFT_AGAIN, names.LEFT_ALONE, unknown=unknown)
            beside = f"{what} that of requests left alone, in one engine"
            yield Goal(beside, ratio(cells, ours, names.LEFT_ALONE), _MOST_COST, noise)


def _unused(measured: CompareMeasurement) -> list[Cell]:
    return [cell for (_, reuse), cells in measured.cells.items() if not reuse for cell in cells]


def _noise(
    cells: Sequence[Cell],
    name: str,
    other: str,
    times: _Times = "seconds",
    *,
    unknown: float = 1.0,
) -> float:
    return ratio(cells, name, other, times).apart if shared(cells, name, other) else unknown
