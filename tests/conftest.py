"""What every test shares: no telemetry, hypothesis without deadlines, `vllm` tests that step aside
where there is no vLLM, and files that are left alone where all of their tests are deselected.
"""

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Inherited by every server a test starts: nothing asks a hub, nothing reports home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

settings.register_profile("dev", deadline=None)
# Shared cores make health checks and deadlines lie; the same examples in every run make a red build
# reproducible.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure() -> None:
    """Give nodes a state folder of the tests' own."""
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="kvhold-tests-state-")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has nothing for this stage (`-m 'not vllm ...'`, `-m vllm`) is not even imported:
    an engine takes ten seconds.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    source = collection_path.read_text()
    for term in config.option.markexpr.split(" and "):
        if (plain := re.fullmatch(r"(not )?(\w+)", term)) is None:
            continue
        unwanted, mark = plain[1], rf"\bpytest\.mark\.{plain[2]}\b"
        has_it, is_all_of_it = (
            re.search(mark, source),
            re.search(rf"^pytestmark = (?:\[[^\]]*|.*){mark}", source, re.MULTILINE),
        )
        if is_all_of_it if unwanted else not has_it:
            return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="no vLLM in this environment"))
