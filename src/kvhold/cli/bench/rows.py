"""One measured number beside the limit measured with it, and how a few of them are printed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvhold.core.errors import ConfigError


@contextmanager
def needing(packages: str) -> Iterator[None]:
    """What is imported here may be missing where kvhold is only used. Raises ConfigError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{error}; this command needs more than kvhold itself: pip install {packages}") from error


@dataclass(frozen=True)
class Row:
    """value and limit are in `unit`; ratio is how much of the limit was reached (a rate: value / limit; a time: limit / value)."""

    name: str
    value: float
    unit: str
    limit: float
    ratio: float


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one a line under a heading, columns aligned."""
    cells = [("", "measured", "limit", "unit", "ratio")]
    cells += [(row.name, f"{row.value:.2f}", f"{row.limit:.2f}", row.unit, f"{row.ratio:.2f}") for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    left = (0, 3)  # columns of text
    lines = []
    for line in cells:
        padded = (text.ljust(width) if n in left else text.rjust(width) for n, (text, width) in enumerate(zip(line, widths, strict=True)))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
