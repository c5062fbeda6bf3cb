"""What tests that step vLLM's scheduler share. vLLM is imported where it is needed: other stages
collect this folder, too.
"""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without anything that could be computed with."""
    from tests.vllm.scheduling import make_folder

    return make_folder(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noted about weights goes to a folder of the test's own; vLLM keeps the
    cache it has.
    """
    from vllm import envs

    monkeypatch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
