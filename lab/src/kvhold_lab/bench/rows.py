import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from kvhold.core.errors import ConfigError


@contextmanager
def needing(packages: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{error}; this command needs more than kvhold itself: pip install {packages}"
        ) from error


def needing_pictures(path: Path | None) -> None:
    if path is not None:
        with needing("'kvhold[lab]'"):
            import matplotlib  # noqa: F401


def machine_and_load() -> str:
    return (
        f"{platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


def write_rows(path: Path | None, rows: Sequence[Any]) -> None:
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


@dataclass(frozen=True)
class Row:
    """ratio: the reached share of the limit"""

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    profile: str = ""


def time_row(name: str, taken_s: float, limit_s: float, *, unit: Literal["ms", "us"] = "ms") -> Row:
    units = {"ms": 1e3, "us": 1e6}[unit]
    return Row(name, taken_s * units, unit, limit_s * units, limit_s / taken_s)


def rate_row(name: str, nbytes: int, taken_s: float, limit_s: float) -> Row:
    return Row(name, nbytes / taken_s / 1e9, "GB/s", nbytes / limit_s / 1e9, limit_s / taken_s)


def in_turn(
    work: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    after: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Median seconds, without the first round. after: untimed clean-up"""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(1 + rounds):
        turns = list(work.items())
        for name, call in reversed(turns) if number % 2 else turns:
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
            if after and name in after:
                after[name]()
    return {name: median(times[1:]) for name, times in seconds.items()}


def table(rows: Sequence[Row]) -> str:
    cells = [
        (
            "",
            "measured",
            "limit",
            "unit",
            "ratio",
            "profile" if any(row.profile for row in rows) else "",
        )
    ]
    cells += [
        (
            row.name,
            f"{row.value:.2f}",
            f"{row.limit:.2f}",
            row.unit,
            f"{row.ratio:.3f}",
            row.profile,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    left = (0, 3, 5)
    lines = []
    for line in cells:
        padded = (
            text.ljust(width) if n in left else text.rjust(width)
            for n, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
