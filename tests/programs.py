"""Programs and packages that tests need. A test without one is skipped with words that
`tests/conftest.py` counts; CI, which installs them, fails.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhold_lab.servers.programs import PACKAGES

SERVERS, SETUP = "make servers", "make setup"
BROUGHT_BY = dict.fromkeys((*PACKAGES, "helm"), SERVERS) | dict.fromkeys(
    (
        "ai-dynamo-runtime",
        "anthropic",
        "compose_spec",
        "hadolint",
        "kubernetes_validate",
        "selenium",
        "vllm-router",
    ),
    SETUP,
)


def reason_without(name: str) -> str:
    return f"{name} is not installed here: {BROUGHT_BY[name]}"


def find_program(name: str) -> str | None:
    """Return its path: in this environment, or on PATH."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path)


def needed_program(name: str) -> str:
    """Return its path, or skip the test."""
    if (found := find_program(name)) is None:
        pytest.skip(reason_without(name))
    return found


def needed_package(module: str) -> Any:
    """Return the module, or skip the test; at the top of a file, all of its tests."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(reason_without(module.partition(".")[0]), allow_module_level=True)
