"""Run an example as its reader does."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(
    name: str, *arguments: str, timeout_s: float = 300, environment: Mapping[str, str] | None = None
) -> str:
    """Return what the example printed. Its exit status must be 0."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVHOLD_")}
    environ |= environment or {}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
