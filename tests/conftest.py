"""What every test shares: no telemetry, hypothesis without deadlines, `vllm` tests that step aside where there is no vLLM."""

import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

# Inherited by every server a test starts: nothing asks a hub, nothing reports home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

settings.register_profile("dev", deadline=None)
# Shared cores make health checks and deadlines lie; the same examples in every run make a red build reproducible.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="no vLLM in this environment"))
