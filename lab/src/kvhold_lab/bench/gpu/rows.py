from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRow:
    """limit: in the same unit and run; None: none
    ok:    goal met, or check passed; None: no goal here
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
    """goal: the least ratio"""
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
    return GpuRow(part, name, count, "checks", ok=passed)
