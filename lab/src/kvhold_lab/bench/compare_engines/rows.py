from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kvhold_lab.bench.compare_engines.systems import CHECKED_LIMIT, LIMITS, OURS, SERVERS, SYSTEMS
from kvhold_lab.bench.ratios import Cell, Goal, Ratio, ratio, shared

STORE, WRITTEN, RETRIEVE, LOOKUP = "store", "store, written", "retrieve", "lookup"
IMPORT, IMPORT_CLIENT, START, MEMORY = "import", "import, client", "start-up", "memory"
NO_TIER = "-"
DISK, CACHED_DISK, REDIS = (
    "disk",
    "cached-disk",
    "redis",
)
DISKS = (DISK, CACHED_DISK)
LOWER_TIERS = (*DISKS, REDIS)

_THEIRS = tuple(name for name in SYSTEMS if name not in OURS)
_OF_SERVER, _OF_BEST = "the best of its servers", "its best mode"
_AT_MOST = {  # (operation, tier) -> the peers, the largest ratio
    **{(operation, "ram"): (_OF_SERVER, 0.5) for operation in (STORE, RETRIEVE)},
    **{
        (operation, tier): (_OF_BEST, 0.6)
        for operation in (WRITTEN, RETRIEVE)
        for tier in LOWER_TIERS
    },
    (LOOKUP, "ram"): (_OF_BEST, 0.2),
    **{
        (operation, NO_TIER): (_OF_SERVER, 0.5)
        for operation in (IMPORT, IMPORT_CLIENT, START, MEMORY)
    },
}


@dataclass
class Measured:
    cells: dict[tuple[str, str], list[Cell]] = field(default_factory=lambda: defaultdict(list))
    nbytes: dict[tuple[str, str], int] = field(default_factory=dict)
    equal: dict[tuple[str, str, str], bool] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, operation: str, tier: str, values: dict[str, float], nbytes: int = 0) -> None:
        self.cells[operation, tier].append(Cell(reuse=0, num_tokens=0, burst=False, seconds=values))
        self.nbytes[operation, tier] = nbytes

    def compare(self, operation: str, tier: str, system: str, equal: bool) -> None:
        key = operation, tier, system
        self.equal[key] = self.equal.get(key, True) and equal


@dataclass(frozen=True)
class CompareRow:
    """None: not measured or not applicable. ratio_to_best_peer: below 1 is better"""

    operation: str
    tier: str
    system: str
    median_s: float | None = None
    median_bytes: float | None = None
    mb_s: float | None = None
    ratio_to_best_peer: float | None = None
    best_peer: str = ""
    equal: bool | None = None
    error: str = ""
    ratios: dict[str, Ratio] = field(default_factory=dict)


def make_rows(measured: Measured) -> list[CompareRow]:
    rows = []
    for (operation, tier), cells in measured.cells.items():
        values = {
            name: [cell.seconds[name] for cell in cells if name in cell.seconds]
            for name in (*SYSTEMS, *LIMITS)
        }
        medians = {name: median(found) for name, found in values.items() if found}
        for name, middle in medians.items():
            ratios = {
                other: ratio(cells, name, other)
                for other in medians
                if other != name and shared(cells, name, other)
            }
            best = min(
                (other for other in ratios if _are_peers(name, other)),
                key=medians.__getitem__,
                default="",
            )
            nbytes = measured.nbytes[operation, tier]
            rows.append(
                CompareRow(
                    operation,
                    tier,
                    name,
                    median_s=None if operation == MEMORY else middle,
                    median_bytes=middle if operation == MEMORY else None,
                    mb_s=nbytes / middle / 1e6 if nbytes else None,
                    ratio_to_best_peer=ratios[best].median if best else None,
                    best_peer=best,
                    equal=measured.equal.get((operation, tier, name)),
                    error=measured.errors.get((tier, name), ""),
                    ratios=ratios,
                )
            )
    shown = {(row.tier, row.system) for row in rows}
    failed = [
        CompareRow("start", tier, name, error=why)
        for (tier, name), why in measured.errors.items()
        if (tier, name) not in shown
    ]
    return rows + failed


def goals(rows: Sequence[CompareRow]) -> list[Goal]:
    found = []
    for (operation, tier), (of, most) in _AT_MOST.items():
        there = [
            row for row in rows if (row.operation, row.tier) == (operation, tier) and row.ratios
        ]
        for names, told in (
            (OURS, ""),
            (LIMITS, ", the limit itself"),
            ((CHECKED_LIMIT,), ", the limit with a check and a copy"),
        ):
            best = min((row for row in there if row.system in names), key=_value, default=None)
            peers = (
                [
                    name
                    for name in best.ratios
                    if name in SERVERS or (of == _OF_BEST and name in _THEIRS)
                ]
                if best
                else []
            )
            if best and peers:
                peer = max(peers, key=lambda name: best.ratios[name].median)
                where = "" if tier == NO_TIER else f" ({tier})"
                found.append(
                    Goal(
                        f"{operation}{where}: over that of LMCache, {of}{told}",
                        best.ratios[peer],
                        most,
                    )
                )
    return found


def render(rows: Sequence[CompareRow]) -> str:
    width = max(map(len, SYSTEMS))
    lines = [
        (
            f"{'operation':<15} {'tier':<11} {'system':<{width}}  {'median':>10} {'MB/s':>6}  "
            "bytes   to the best other, 95 % interval"
        )
    ]
    before = None
    for row in rows:
        if (row.operation, row.tier) != before:
            lines.append("")
        before = row.operation, row.tier
        value, rate, equal, compared = (
            "-",
            "-",
            {True: "equal", False: "DIFFER", None: "-"}[row.equal],
            "-",
        )
        if row.median_s is not None:
            value = f"{row.median_s * 1e3:.2f} ms"
        elif row.median_bytes is not None:
            value = f"{row.median_bytes / 1e6:.0f} MB"
        if row.mb_s is not None:
            rate = f"{row.mb_s:.0f}"
        if row.best_peer:
            best = row.ratios[row.best_peer]
            compared = f"{best.median:.3f} ({best.low:.3f}-{best.high:.3f}) of {row.best_peer}"
        if row.error:
            compared = f"FAILED: {row.error.splitlines()[0]}"
        lines.append(
            f"{row.operation:<15} {row.tier:<11} {row.system:<{width}}  {value:>10} "
            f"{rate:>6}  {equal:<6}  {compared}".rstrip()
        )
    told = dict.fromkeys((row.system, row.error) for row in rows if "\n" in row.error)
    return "\n".join([*lines, *(f"\n{system}: {error}" for system, error in told)])


def _value(row: CompareRow) -> float:
    return row.median_s or row.median_bytes or 0.0


def _are_peers(name: str, other: str) -> bool:
    return not (other in LIMITS or (name in OURS and other in OURS))
