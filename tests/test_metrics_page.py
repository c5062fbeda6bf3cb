"""The page about metrics names every metric, label and reason that there is, and none
that is not.
"""

import ast
import re
from pathlib import Path

import pytest

from kvhold.control.advice import ACTIONS
from kvhold.core.metrics import TABLE
from kvhold.core.reasons import REASONS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/metrics.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """The table under a heading: each name in a first cell, with the other cells of its row."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([\w:]+)`", names):
                assert name not in found, f"{name} stands twice"
                found[name] = cells
    return found


def engine_counts() -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Of `stats.py`, which needs vLLM to be imported: `METRICS` with their labels, and the words of
    the engine's own reasons.
    """
    tree = ast.parse((ROOT / "src/kvhold/integrations/vllm/stats.py").read_text())
    metrics: dict[str, tuple[str, ...]] = {}
    reasons: set[str] = set()
    for node in tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "METRICS"
        ):
            assert node.value is not None
            metrics = {name: labels for name, (labels, _) in ast.literal_eval(node.value).items()}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [name.id for name in node.targets[0].elts if isinstance(name, ast.Name)]
            if "NOT_NAMED" in names:
                reasons = set(ast.literal_eval(node.value))
    return metrics, reasons


def test_every_metric_of_an_engine_has_its_row() -> None:
    metrics, _ = engine_counts()
    page = rows("Engine metrics")
    assert metrics
    assert page.keys() == {f"vllm:kvhold_{name}" for name in metrics}
    for name, labels in metrics.items():
        assert tuple(re.findall(r"`(\w+)`", page[f"vllm:kvhold_{name}"][0])) == labels, name


def test_every_metric_of_the_node_has_its_row() -> None:
    page = rows("Node metrics")
    assert page.keys() == TABLE.keys()
    for name, metric in TABLE.items():
        assert tuple(re.findall(r"`(\w+)`", page[name][0])) == metric.labels, name


def test_every_reason_has_its_row() -> None:
    _, reasons = engine_counts()
    assert reasons
    assert rows("Why tokens are missed").keys() == REASONS.keys() | reasons


@pytest.mark.parametrize(
    "name",
    [
        "kvhold_store_skipped_chunks",
        "kvhold_claims_failed",
        "kvhold_protocol_errors",
        "kvhold_connections",
    ],
)
def test_every_label_that_is_counted_is_named(name: str) -> None:
    """Those that stand in the code as they are."""
    row = rows("Node metrics")[name][1]
    labels = [
        keyword.value
        for path in (ROOT / "src/kvhold").rglob("*.py")
        if f'"{name}"' in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and node.args and getattr(node.args[0], "value", "") == name
        for keyword in node.keywords
        if keyword.arg in ("reason", "result")
    ]
    assert labels
    words = [
        part.value
        for label in labels
        for part in ast.walk(label)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    assert all(f"`{word}`" in row for word in words), words


def test_every_reason_to_refuse_a_client_is_named() -> None:
    row = rows("Node metrics")["kvhold_protocol_errors"][1]
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / "src/kvhold/node/connection.py").read_text()))
        if isinstance(node, ast.Call)
    ]
    ends = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("_refuse", "_hang_up", "call_later")
    ]
    kinds = [str(call.args[-1].value) for call in ends if isinstance(call.args[-1], ast.Constant)]
    assert len(kinds) > 5
    assert all(f"`{kind}`" in row for kind in kinds), kinds


def test_every_test_and_file_that_is_named_exists() -> None:
    for name in re.findall(r"`(tests/[\w/.]+)`", PAGE):
        assert (ROOT / name).exists(), name


def test_the_dashboard_gives_the_same_advice() -> None:
    page = rows("Why tokens are missed")
    for reason, action in ACTIONS.items():
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page[reason][-1]).replace("`", "")
        if reason not in ("whole", "never_stored"):
            assert shown == action, reason
