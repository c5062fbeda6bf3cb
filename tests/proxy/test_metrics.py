"""The page of the proxy names every metric, label and setting that there is."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvhold.core.proxy_config import ProxyConfig
from tests.proxy.scripted import engines_and_proxy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/proxy.md").read_text()
SOURCES = ROOT / "src/kvhold/proxy"
CELL = re.compile(r"`([\w:]+)`")


def rows(heading: str) -> dict[str, list[str]]:
    """The table under a heading: each name of a first cell, with the other cells of its row."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found |= dict.fromkeys(CELL.findall(names), cells)
    return found


async def test_every_metric_has_its_row() -> None:
    async with engines_and_proxy(1, 1) as (_, _, proxy):
        text = (await proxy.get("/metrics"))[1]
        page = rows("Metrics")
        exported = {
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in text_string_to_metric_families(text)
            if not family.name.endswith("_created")
        }
        assert exported == page.keys()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                cells = page.get(sample.name, [""])
                assert set(sample.labels) - {"le"} == set(CELL.findall(cells[0]))


@pytest.mark.parametrize(
    ("call", "place", "metric"),
    [
        ("ProxyRefusal", 1, "kvhold_proxy_refused_total"),
        ("ProxyOverloaded", 0, "kvhold_proxy_refused_total"),
        ("EngineFault", 0, "kvhold_proxy_engine_faults_total"),
    ],
)
def test_every_reason_is_named(call: str, place: int, metric: str) -> None:
    row = " ".join(rows("Metrics")[metric])
    used = set()
    for path in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == call:
                argument = node.args[place]
                if isinstance(argument, ast.Constant):
                    used.add(str(argument.value))
    assert len(used) > 1
    assert {word for word in used if f"`{word}`" not in row} == set()


def test_every_setting_is_listed() -> None:
    section = PAGE.split("## Settings\n")[1].split("\n## ")[0].replace("\n  ", " ")
    named = {
        name
        for line in section.splitlines()
        if line.startswith("- `")
        for name in CELL.findall(re.split(r" \(`|: ", line)[0])  # defaults may look like names
    }
    assert named == {field.name for field in fields(ProxyConfig)}
