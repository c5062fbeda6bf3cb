"""The soak of blended and exact requests: a sample of it, and whether it finds a missing salt."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold_lab.bench.command import command

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_exact_requests_beside_blended_ones_are_those_of_vllm_alone(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        command, ["soak", "blend", "--requests", "60", "--json", str(tmp_path / "out.json")]
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["wrong"], found["errors"], found["kv_wrong"], found["kv_unknown"]) == (0, 0, 0, 0)
    assert min(found[name] for name in ("blended", "preemptions", "hits", "evicted")) > 0


def test_the_soak_finds_blended_requests_without_a_private_salt() -> None:
    from kvhold_lab.bench.soak.requests import run

    found = run(60, 1, blends=True, connector="UnsaltedConnector")
    assert not found.passed
    assert found.kv_wrong > 0
