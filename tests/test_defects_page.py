"""The pages that say which test keeps which defect out name tests and files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "0012-defects-that-tiers-cannot-have.md": (9, 10, 11, *range(15, 39)),
    "0015-defects-that-the-engine-side-cannot-have.md": (*range(1, 9), 50, 55, 56, 57),
    "0041-defects-that-hand-overs-cannot-have.md": tuple(range(39, 50)),
}


def page(name: str) -> str:
    return (ROOT / "docs/decisions" / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_every_defect_has_its_line(name: str) -> None:
    listed = re.findall(r"^- (D\d+), ", page(name), re.MULTILINE)
    assert listed == [f"D{n}" for n in PAGES[name]]


@pytest.mark.parametrize("page_name", PAGES)
def test_every_test_and_file_that_is_named_exists(page_name: str) -> None:
    written = "\n".join(
        path.read_text()
        for folder in ("tests", "src/kvhold/testing")
        for path in (ROOT / folder).rglob("*.py")
    )
    for name, more in re.findall(
        r"`((?:test_|Test|PolicyContract|TierContract)\w*)(\.\.\.)?`", page(page_name)
    ):
        ends = r"\w*" if more else r"\b"
        defined = rf"^(?:\s*(?:async )?(?:def|class) {name}{ends}|{name} = \w+\.TestCase)"
        assert re.search(defined, written, re.MULTILINE), name
    for name in re.findall(r"`(tests/[\w/*.]+)`", page(page_name)):
        assert list(ROOT.glob(name)), name
