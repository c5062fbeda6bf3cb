from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["pass", "FAIL", "refused", "unsupported", "off"]

UNSUPPORTED = "unsupported by vLLM"


@dataclass(frozen=True)
class VerifyRow:
    """kv_exact:     all loaded blocks had the computed bytes; None: none was compared
    tokens_equal: to vLLM alone, except at near ties; None: not run, or no proof
    outcome:      "refused": by kvhold; "unsupported": vLLM does not run it, or not reproducibly;
        "off": vLLM turns the path off
    ties:         answers that differ after a near tie
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


def table(rows: Sequence[VerifyRow]) -> str:
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
