"""The files in deploy/: accepted by the programs that read them, and true to the code."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvhold.core.config import Config, load_config
from kvhold.core.metrics import TABLE
from tests.programs import needed_program

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
RULES = DEPLOY / "prometheus/kvhold.rules.yaml"
DASHBOARD = DEPLOY / "grafana/kvhold.json"


def series(name: str) -> set[str]:
    """The series of a metric, as Prometheus has them."""
    metric = TABLE[name]
    if metric.kind == "counter":
        return {f"{name}_total"}
    if metric.kind == "histogram":
        return {f"{name}_{suffix}" for suffix in ("bucket", "count", "sum")}
    return {name}


def expressions() -> dict[str, str]:
    """Of the rules and of the dashboard's panels, by name."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    found = {rule.get("alert", rule.get("record")): rule["expr"] for rule in rules}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']}/{target['refId']}"] = target["expr"]
    return found


def test_every_expression_uses_series_and_labels_that_exist() -> None:
    known = {one: name for name in TABLE for one in series(name)}
    found = expressions()
    assert len(found) > 20
    for where, text in found.items():
        used = re.findall(r"(?<!:)\bkvhold_\w+", text)
        assert used or "kvhold:" in text, where
        assert set(used) <= known.keys(), where
        labels = {label for one in used for label in TABLE[known[one]].labels}
        for grouped in re.findall(r"by \(([\w, ]+)\)", text):
            assert set(grouped.split(", ")) <= labels | {"instance", "le"}, where


def test_prometheus_accepts_the_rules() -> None:
    checked = subprocess.run(
        [needed_program("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_accepts_the_settings_of_the_docs(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs/deploy.md").read_text()
    (settings,) = re.findall(r"^```yaml\n(scrape_configs:.*?)^```", page, re.MULTILINE | re.DOTALL)
    file = tmp_path / "prometheus.yml"
    file.write_text(settings)
    checked = subprocess.run(
        [needed_program("promtool"), "check", "config", "--syntax-only", str(file)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    verify = needed_program("systemd-analyze")
    command = Path(sys.executable).with_name("kvhold")
    for each in UNITS:
        text = each.read_text().replace("/usr/local/bin/kvhold", str(command))
        (tmp_path / each.name).write_text(text)
    name = unit.name.replace("@", "@root")
    checked = subprocess.run(
        [verify, "verify", "--recursive-errors=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_variables_of_units_are_settings(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_here = dict(re.findall(r"^Environment=(KVHOLD_\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    assert set_here
    for name, value in set_here.items():
        monkeypatch.setenv(name, value)
    config = load_config()
    assert config != Config()
    assert config.node.socket == "/run/kvhold-%i/node.sock"


def test_the_dashboard_is_whole() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["title"] for panel in panels})
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
