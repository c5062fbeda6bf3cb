"""One line of the table of `kvhold bench gpu`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRow:
    """A measurement, or a check.

    limit: of the same unit, measured in the same run; None: there is none
    ratio: value / limit
    ok:    whether the goal is met, or the check passed; None: there is no goal, or not for this
        target
    """

    part: str
    name: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    ok: bool | None = None


def rate(
    part: str, name: str, nbytes: int, seconds: float, limit_s: float, goal: float | None
) -> GpuRow:
    """GB/s beside the GB/s of a limit that moves as many bytes. goal: the least ratio."""
    ratio = limit_s / seconds
    ok = None if goal is None else ratio >= goal
    return GpuRow(
        part,
        name,
        round(nbytes / seconds / 1e9, 2),
        "GB/s",
        round(nbytes / limit_s / 1e9, 2),
        round(ratio, 3),
        ok,
    )


def check(part: str, name: str, passed: bool, count: int = 1) -> GpuRow:
    """Something that must be so. count: how often it was tried."""
    return GpuRow(part, name, count, "checks", ok=passed)
