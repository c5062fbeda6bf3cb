"""An adapter is named by its files if this engine cannot have loaded others from there, or its
workers say what they loaded.
"""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.integrations.vllm.naming import adapters, loads
from kvhold.integrations.vllm.naming.adapters import Adapters, AdapterUse
from kvhold.integrations.vllm.naming.loads import AdapterLoads, can_observe, observed_loads

pytestmark = pytest.mark.usefixtures("notes")

AGE_NS = 10**12


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far the engine's clock is ahead of the files', in nanoseconds: files written now are that
    much older than it.
    """
    ahead = [0]
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + ahead[0])
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


def test_one_replaced_while_the_engine_runs_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_link_that_was_set_to_older_files_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the link is newer than the engine."""
    new = make_adapter(tmp_path / "new", b"new")
    (tmp_path / "current").symlink_to("new")
    (tmp_path / "through").symlink_to("current")
    adapter = SimpleNamespace(lora_int_id=1, lora_name="tuned", lora_path=str(tmp_path / "through"))
    monkeypatch.setattr(adapters, "_changed", lambda status: 0)
    engine = Adapters()
    assert engine.name_of(adapter) is None
    assert engine.name_of(new) is not None


class Worker:
    """One whose loads are observed. What it loads is the bytes of the weights."""

    def __init__(self) -> None:
        self.loads = AdapterLoads()
        self._load = self.loads.observing(
            lambda _, adapter: (Path(adapter.lora_path) / "adapter_model.safetensors").read_bytes()
        )

    def load(self, adapter: Any) -> bytes:
        loaded: bytes = self._load(None, adapter)
        return loaded


@pytest.fixture(params=["files that have just changed", "files that had long been as they are"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Worker:
    if "long" in request.param:
        monkeypatch.setattr(loads, "has_settled", lambda path: True)
    return Worker()


def use_of(adapter: Any, *, observes: bool = True) -> AdapterUse:
    """The adapter as an engine names it that started before its files were written."""
    engine = Adapters(lambda: observes)
    engine.name_of(adapter)
    return engine.use_of(adapter)


class TestNewerThanTheEngine:
    def test_it_is_named_as_in_every_other_engine_and_only_used_once_it_was_loaded(
        self, tmp_path: Path, clock: list[int], worker: Worker
    ) -> None:
        adapter = make_adapter(tmp_path / "a")
        clock[0] = -AGE_NS
        engine = Adapters(lambda: True)
        clock[0] = AGE_NS
        assert engine.name_of(adapter) == Adapters().name_of(adapter) is not None
        use = engine.use_of(adapter)
        assert use.is_newer
        assert not worker.loads.match(use)
        assert worker.load(adapter) == b"old"
        assert worker.loads.match(use)

    def test_one_that_was_loaded_before_its_files_changed_is_not_used(
        self, tmp_path: Path, worker: Worker
    ) -> None:
        worker.load(make_adapter(tmp_path / "a"))
        changed = make_adapter(tmp_path / "a", b"new")
        use = use_of(changed)
        assert use.identity
        assert not worker.loads.match(use)
        worker.load(changed)
        assert not worker.loads.match(use), "what was computed before has the same number"

    def test_files_that_change_after_the_load_are_not_used(
        self, tmp_path: Path, worker: Worker
    ) -> None:
        """The engine may have them mapped, and loads them again when it likes."""
        adapter = make_adapter(tmp_path / "a")
        worker.load(adapter)
        use = use_of(adapter)
        assert worker.loads.match(use)
        make_adapter(tmp_path / "a", b"new")
        assert not worker.loads.match(use)

    def test_files_that_change_during_the_load_are_not_used(self, tmp_path: Path) -> None:
        adapter = make_adapter(tmp_path / "a")
        worker = AdapterLoads()
        worker.observing(lambda _, adapter: make_adapter(Path(adapter.lora_path), b"new"))(
            None, adapter
        )
        assert not worker.match(use_of(adapter))

    def test_another_adapter_under_the_same_number_is_not_used(
        self, tmp_path: Path, worker: Worker
    ) -> None:
        worker.load(make_adapter(tmp_path / "a"))
        assert not worker.loads.match(use_of(make_adapter(tmp_path / "b", b"new")))

    def test_a_load_of_what_cannot_be_told_does_not_fail(
        self, tmp_path: Path, worker: Worker
    ) -> None:
        adapter = make_adapter(tmp_path / "a")
        (tmp_path / "a" / "adapter_config.json").unlink()
        nowhere = SimpleNamespace(
            lora_int_id=1, lora_name="tuned", lora_path="no-such-user/no-such-adapter"
        )
        assert worker.loads.observing(lambda *_: b"loaded")(None, nowhere) == b"loaded"
        assert not worker.loads.match(use_of(adapter))

    def test_where_too_many_were_loaded_none_is_used(
        self, tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapter = make_adapter(tmp_path / "a")
        worker.load(adapter)
        assert worker.loads.match(use_of(adapter))
        monkeypatch.setattr(loads, "_MOST_LOADS", 1)
        assert not worker.loads.match(use_of(adapter))


def test_one_that_is_older_needs_no_load_but_none_of_others(
    tmp_path: Path, clock: list[int], worker: Worker
) -> None:
    adapter = make_adapter(tmp_path / "a")
    clock[0] = AGE_NS
    use = use_of(adapter)
    assert not use.is_newer
    assert worker.loads.match(use)
    worker.load(make_adapter(tmp_path / "b", b"new"))
    assert not worker.loads.match(use)


def test_vllms_own_method_is_wrapped_once() -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    assert can_observe()
    assert observed_loads() is observed_loads()
    assert LRUCacheWorkerLoRAManager._load_adapter.kvhold_loads is observed_loads()
    assert not hasattr(LRUCacheWorkerLoRAManager._load_adapter.__wrapped__, "kvhold_loads")
