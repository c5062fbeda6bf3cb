"""`kvhold demo` on a real vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.demo.test_demo import FIELDS

pytestmark = pytest.mark.vllm


def test_the_demo_shows_hits_in_both_engines_and_identical_outputs(tmp_path: Path) -> None:
    figures = tmp_path / "demo.json"
    command = [
        sys.executable,
        "-m",
        "kvhold",
        "demo",
        "--model-size",
        "tiny",
        "--tokens",
        "700",
        "--repeats",
        "1",
        "--json",
        str(figures),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outputs identical  yes" in done.stdout
    measured = json.loads(figures.read_text())
    assert measured.keys() >= FIELDS
    assert measured["tokens_reused"] == 700 // 128 * 128
    assert measured["identical"] is True
    assert all(
        measured[f"{name}_ttft_s"] > 0 for name in ("cold", "hit_same", "hit_new", "prefix_cache")
    )
