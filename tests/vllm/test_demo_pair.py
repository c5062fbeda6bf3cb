"""`kvhold demo --pd` on two real vLLMs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]


def test_the_demo_shows_a_hand_over_and_identical_outputs(tmp_path: Path) -> None:
    figures, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    command = [sys.executable, "-m", "kvhold", "demo", "--pd", "--model-size", "tiny"]
    command += ["--tokens", "700", "--repeats", "1"]
    command += ["--json", str(figures), "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens handed over" in done.stdout
    measured = json.loads(figures.read_text())
    assert measured["identical"] is True
    assert measured["handed_tokens"] >= 700 // 128 * 128
    for name in ("one_engine", "two_engines"):
        assert all(seconds > 0 for seconds in measured[name].values())
    assert picture.read_bytes().startswith(b"\x89PNG")
