"""The page about tracing names every span, attribute and setting that there is."""

import re
from dataclasses import fields
from pathlib import Path

from kvhold.core.otel_config import OtelConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tracing.md").read_text()
NAMES = {
    name
    for path in (ROOT / "src/kvhold").rglob("*.py")
    if "kvhold.core.tracing import" in (source := path.read_text())
    for name in re.findall(r'"(kvhold\.[a-z_]+(?:\.[a-z_]+)*)"', source)
}
"""In the code that makes spans."""


def first_cells(heading: str) -> set[str]:
    """What the tables under a heading have in backticks in their first column."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_every_span_and_attribute_is_named() -> None:
    spans = {name for name in first_cells("Spans") if f"─ {name} " in PAGE}
    assert len(spans) == 8 and spans <= NAMES
    for name in NAMES - spans:
        assert f"`{name}`" in PAGE or f"`{name.removeprefix('kvhold.')}`" in PAGE, name


def test_every_setting_has_its_row_with_its_default() -> None:
    assert first_cells("Sampling and limits") == {f"otel.{one.name}" for one in fields(OtelConfig)}
    for one in fields(OtelConfig):
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `otel.{one.name}` |"))
        default = row.split("|")[2].strip().strip("`")
        shown = str(one.default).lower() if one.default not in ("", ()) else ""
        assert default == shown, one.name
