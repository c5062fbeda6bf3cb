"""A row of the result, and how rows are shown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["pass", "FAIL", "refused", "unsupported", "off"]

UNSUPPORTED = "unsupported by vLLM"  # the path of a model that vLLM does not run at all


@dataclass(frozen=True)
class Row:
    """One model in one path.

    kv_exact:     every block that was loaded held the bytes that were computed for its tokens;
        None: nothing was to be compared
    tokens_equal: every token of every request was what vLLM answered without a connector, up to a
        near tie at least; None: not run
    requests:     how many were asked with the connector, those that fill the cache included
    outcome:      "refused": kvhold does not serve this set-up; "unsupported": vLLM does not run it, or not twice alike; "off": vLLM turns
                  this path off here
    reason:       what to know about it; mostly empty where it passed
    blocks:       how many loaded blocks were compared
    ties:         answers that are not the same after a near tie of vLLM's own
    """

    model: str
    path: str
    kv_exact: bool | None
    tokens_equal: bool | None
    requests: int
    outcome: Outcome
    reason: str = ""
    blocks: int = 0
    ties: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, then the reasons of those that did not pass."""
    cells = [
        ("model", "path", "KV exact", "tokens equal", "ties", "requests", "blocks", "seconds", "")
    ]
    cells += [
        (
            row.model,
            row.path,
            _word(row.kv_exact),
            _word(row.tokens_equal),
            str(row.ties),
            str(row.requests),
            str(row.blocks),
            f"{row.seconds:.1f}",
            row.outcome,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    numbers = (4, 5, 6, 7)
    lines = [
        "  ".join(
            text.rjust(width) if n in numbers else text.ljust(width)
            for n, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines = [line.rstrip() for line in lines]
    reasons = [
        f"{row.model}, {row.path}: {row.outcome}: {row.reason}" for row in rows if row.reason
    ]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _word(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"
