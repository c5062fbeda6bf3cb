"""The page that says which test keeps which defect out names tests and files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/decisions/0012-defects-that-tiers-cannot-have.md").read_text()


def test_every_defect_has_its_line() -> None:
    listed = re.findall(r"^\| (D\d+) \|", PAGE, re.MULTILINE)
    assert listed == [f"D{n}" for n in (9, 10, 11, *range(15, 39))]


def test_every_test_and_file_that_is_named_exists() -> None:
    written = "\n".join(path.read_text() for folder in ("tests", "src/kvhold/testing") for path in (ROOT / folder).rglob("*.py"))
    for name in re.findall(r"`((?:test_|Test|PolicyContract|TierContract)\w*)(?:\.\.\.)?`", PAGE):
        assert re.search(rf"(?:def|class|=) ?{name}", written) or name in written, name
    for name in re.findall(r"`(tests/[\w/*.]+)`", PAGE):
        assert list(ROOT.glob(name)), name
