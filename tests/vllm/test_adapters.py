"""An adapter is named by its files only if this engine cannot have loaded others from the same place."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.integrations.vllm.naming import adapters
from kvhold.integrations.vllm.naming.adapters import Adapters

pytestmark = pytest.mark.usefixtures("notes")

AGE_NS = 10**12


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far the engine's clock is ahead of the files', in nanoseconds: files written now are that much older than it."""
    ahead = [0]
    now = time.time_ns
    monkeypatch.setattr(adapters.time, "time_ns", lambda: now() + ahead[0])
    return ahead


def make_adapter(folder: Path, weights: bytes = b"old") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_int_id=1, lora_name="tuned", lora_path=str(folder))


def test_one_written_before_the_engine_started_is_named(tmp_path: Path, clock: list[int]) -> None:
    adapter = make_adapter(tmp_path / "a")
    clock[0] = AGE_NS
    one, other = Adapters(), Adapters()
    assert one.name_of(adapter) == other.name_of(adapter) is not None
    assert one.is_unchanged(adapter)


def test_one_replaced_while_the_engine_runs_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM may have loaded the old files ahead of the first request."""
    adapter = make_adapter(tmp_path / "a")
    engine = Adapters()
    make_adapter(tmp_path / "a", b"new")
    assert engine.name_of(adapter) is None
    assert engine.name_of(adapter) is None
    assert not engine.is_unchanged(adapter)
    assert caplog.text.count("newer than this engine") == 1


def test_times_set_back_do_not_help(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    engine = Adapters()
    make_adapter(tmp_path / "a", b"new")
    for path in (tmp_path / "a", *(tmp_path / "a").iterdir()):
        os.utime(path, (0, 0))
    assert engine.name_of(adapter) is None


def test_a_link_that_was_set_to_older_files_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the link is newer than the engine."""
    new = make_adapter(tmp_path / "new", b"new")
    (tmp_path / "current").symlink_to("new")
    (tmp_path / "through").symlink_to("current")
    adapter = SimpleNamespace(lora_int_id=1, lora_name="tuned", lora_path=str(tmp_path / "through"))
    monkeypatch.setattr(adapters, "_changed", lambda status: 0)
    engine = Adapters()
    assert engine.name_of(adapter) is None
    assert engine.name_of(new) is not None
