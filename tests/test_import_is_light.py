"""`import kvhold` is free: no framework, no engine, no compiler, no server code comes with it."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "vllm",
    "sglang",
    "transformers",
    "numba",
    "llvmlite",
    "triton",
    "matplotlib",
    "yaml",
    "pytest",
    "hypothesis",
    "aiohttp",
    "nats",
)


def modules_after(statement: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter that ran `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import kvhold", "import kvhold.core"])
def test_import_brings_no_heavy_module(statement: str) -> None:
    assert not modules_after(statement).intersection(HEAVY)
