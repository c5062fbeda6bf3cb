"""Every page is listed, every link and path leads somewhere, and all that is named is built."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ALL = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "lab" / "README.md"]
SOURCES = ROOT / "src" / "kvhold"

FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
IN_API = re.compile(r"^::: (\S+)$", re.MULTILINE)
# a path from the repository's root
PATH = re.compile(r"(?<![\w/.-])(?:src|tests|docs|tools|examples|lab|benchmarks)/[\w./*-]*[\w/]")
MODULE = re.compile(r"`([\w/]+(?:\.py|/))`")
# The history and the decisions may name what was tried, or what other systems have.
NOT_BUILT = re.compile(r"\b(exporter|coordinator|kvhold\.control)\b")
CLUSTER = re.compile(r"\bclusters?\b", re.IGNORECASE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links(path: Path) -> Iterator[str]:
    """The relative links of a page, code left out."""
    for target in LINK.findall(CODE.sub("", FENCE.sub("", path.read_text()))):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs names them."""
    text = path.read_text()
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 0
        while (unique := f"{slug}_{number}" if number else slug) in found:
            number += 1
        found.add(unique)
    return found


def leads_somewhere(page: Path, target: str) -> bool:
    place, _, anchor = target.partition("#")
    file = (page.parent / place).resolve() if place else page
    if not file.exists():
        return False
    if not anchor or file.suffix != ".md" or anchor in anchors(file):
        return True
    return any(f"{anchor}.".startswith(f"{name}.") for name in IN_API.findall(file.read_text()))


def in_navigation(node: Any) -> Iterator[str]:
    """The pages of a part of MkDocs' `nav`."""
    if isinstance(node, str):
        yield node
    else:
        for part in node.values() if isinstance(node, dict) else node:
            yield from in_navigation(part)


def test_every_page_is_in_the_navigation() -> None:
    yaml = pytest.importorskip("yaml", reason="no PyYAML in this environment")
    listed = set(in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert {str(page.relative_to(DOCS)) for page in PAGES} - listed == set()


@pytest.mark.parametrize("index", [DOCS / "index.md", DOCS / "decisions" / "index.md"], ids=name_of)
def test_an_index_lists_every_page_of_its_folder(index: Path) -> None:
    listed = {target.partition("#")[0] for target in links(index)}
    assert {page.name for page in index.parent.glob("*.md")} - {"index.md"} - listed == set()


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_every_relative_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    assert [target for target in links(page) if not leads_somewhere(page, target)] == []


def test_a_link_to_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `name`, and more\n\n## Two\n\n## Two\n\n::: kvhold.core\n")
    for good in ("page.md", "#a-name-and-more", "page.md#two_1", "#kvhold.core.keys"):
        assert leads_somewhere(page, good)
    for bad in ("other.md", "#three", "page.md#two_2", "#kvhold.cor"):
        assert not leads_somewhere(page, bad)


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_every_path_from_the_root_exists(page: Path) -> None:
    text = page.read_text()
    code = "\n".join([*FENCE.findall(text), *CODE.findall(text)])
    assert [path for path in PATH.findall(code) if not any(ROOT.glob(path))] == []


def test_every_module_of_the_architecture_exists() -> None:
    missing = []
    for line in (DOCS / "architecture.md").read_text().replace("\n  ", " ").splitlines():
        row = re.match(r"- `([\w/]+)/`:", line)
        places = [ROOT, SOURCES, SOURCES / row[1] if row else SOURCES]
        missing += [
            name
            for name in MODULE.findall(line)
            if not any((place / name).exists() for place in places)
        ]
    assert missing == []


HOP = re.compile(r"`([\w/]+\.py)`: (`[\w.]+`)")
NAME = re.compile(r"`((?:\w+\.)?\w+)`")


def test_every_hop_of_the_architecture_is_a_function_of_its_file() -> None:
    hops = HOP.findall((DOCS / "architecture.md").read_text())
    assert len(hops) > 40
    for file, text in hops:
        source = (SOURCES / file).read_text()
        first = NAME.search(text)
        assert first is not None, (file, text)
        owner, _, name = first[1].rpartition(".")
        assert re.search(rf"^\s*(?:async )?def {name}\(", source, re.MULTILINE), (file, first[1])
        assert not owner or re.search(rf"^class {owner}\b", source, re.MULTILINE), (file, owner)


def test_every_package_is_in_the_architecture() -> None:
    text = (DOCS / "architecture.md").read_text()
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}/" not in text} == set()


@pytest.mark.parametrize(
    "page", [p for p in ALL if p.parent == DOCS or p.parent == ROOT], ids=name_of
)
def test_no_page_names_a_feature_that_is_not_built(page: Path) -> None:
    text = page.read_text()
    assert NOT_BUILT.findall(text) == []
    lines = [line for line in text.splitlines() if CLUSTER.search(line)]
    assert [line for line in lines if "redis" not in line.lower()] == []
