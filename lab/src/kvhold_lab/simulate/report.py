from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhold.core.sizes import format_size

if TYPE_CHECKING:
    from kvhold_lab.simulate.simulation import SimulatedRow

HEADING = (
    f"{'policy':13} {'memory':>10} {'below':>10} {'codec':>12} {'tokens':>8} {'memory':>8} "
    f"{'below':>8} {'requests':>9} {'saved':>10} "
    f"{'read':>10} {'stored':>10} {'evicted':>10} {'M chunks/s':>10}"
)


@dataclass(frozen=True)
class Checked:
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
