"""Requests with LoRA adapters under vLLM's real scheduler."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from vllm.lora.request import LoRARequest

from kvhold.integrations.vllm.geometry import mixes_adapters
from kvhold.integrations.vllm.naming import adapters
from tests.vllm.engines import BLOCK, MakeEngine, engine, forget_locally, node
from tests.vllm.scheduling import Engine, make_prompt

__all__ = ["engine", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


@pytest.fixture
def files_count_as_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are named only if they are older than the engine: see
    tests/vllm/test_adapters.py.
    """
    monkeypatch.setattr(adapters, "MARGIN_NS", -(10**18))


@pytest.mark.usefixtures("files_count_as_old")
class TestAdapters:
    PROMPT = make_prompt("adapters", 300)

    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Callable[..., LoRARequest]:
        def make(
            folder: str, weights: bytes = b"weights", *, name: str = "tuned", number: int = 1
        ) -> LoRARequest:
            path = tmp_path / folder
            path.mkdir(exist_ok=True)
            (path / "adapter_config.json").write_text("{}")
            (path / "adapter_model.safetensors").write_bytes(weights)
            return LoRARequest(name, number, str(path))

        return make

    def hit(self, engine: Engine, adapter: LoRARequest | None) -> int:
        """Tokens that a request with this adapter finds; it is computed and stored afterwards."""
        before = len(engine.loads)
        engine.add(f"{before} {len(engine.outputs)}", self.PROMPT, lora_request=adapter)
        engine.run()
        forget_locally(engine)
        return sum(BLOCK * len(load.block_ids[0]) for load in engine.loads[before:])

    def test_each_has_its_own_kv_whatever_its_name(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        tuned = engine()
        assert self.hit(tuned, None) == 0
        assert self.hit(tuned, adapter("one", number=1)) == 0
        assert self.hit(tuned, adapter("one", number=1)) == 288
        assert self.hit(tuned, adapter("other", b"Weights", number=2)) == 0
        assert self.hit(tuned, None) == 288

    def test_one_loaded_again_from_changed_files_is_not_cached_whatever_its_number(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        """vLLM's prefix cache goes by name and path: it answers with the first one's KV."""
        tuned = engine()
        tuned.add("first", self.PROMPT, lora_request=adapter("one", b"old", number=1))
        tuned.run()
        stored = len(tuned.stores)
        assert stored
        tuned.add("second", self.PROMPT, lora_request=adapter("one", b"new", number=2))
        tuned.run()
        assert len(tuned.stores) == stored
        assert self.hit(tuned, adapter("elsewhere", b"new", number=3)) == 0

    def test_the_same_content_elsewhere_is_the_same(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        one, two = engine(), engine()
        tuned, copy = adapter("here", b"the same"), adapter("there", b"the same", number=7)
        assert self.hit(one, tuned) == 0
        assert self.hit(two, copy) == 288

    def test_files_that_change_in_place_are_not_cached_any_more(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        """vLLM evicts adapters and loads them from their files again, so a worker may have either
        state. Another engine has the new one.
        """
        old = engine()
        assert self.hit(old, adapter("mutable", b"first")) == 0
        assert self.hit(old, adapter("mutable", b"first")) == 288, (
            "written again with the same content"
        )
        changed = adapter("mutable", b"second version")
        stored = len(old.stores)
        reloaded = LoRARequest("tuned", 1, changed.lora_path, load_inplace=True)
        for request in (changed, changed, reloaded):
            assert self.hit(old, request) == 0
        assert self.hit(old, adapter("mutable", b"first")) == 0, "back again, and too late"
        assert len(old.stores) == stored
        changed = adapter("mutable", b"second version")
        fresh = engine()
        assert self.hit(fresh, changed) == 0
        assert self.hit(fresh, changed) == 288

    def test_files_that_change_before_a_step_is_planned_store_nothing(
        self, engine: MakeEngine, adapter: Callable[..., LoRARequest]
    ) -> None:
        """The worker loads the adapter with its first step, which is after the request
        was named.
        """
        changing = engine()
        request = adapter("soon", b"before")
        changing.add("named", self.PROMPT, lora_request=request)
        naming = changing.connector.scheduler._request_states["named"].naming
        assert naming is not None and naming.result(timeout=10) is not None
        adapter("soon", b"after")
        changing.run()
        assert changing.stores == []

    @pytest.mark.parametrize(
        "path",
        [
            "/nowhere/at/all",
            "~/nowhere-at-all",
            "no-such-user/no-such-adapter",
            "not a name:at all",
            "s3://bucket/adapter",
        ],
    )
    def test_one_that_cannot_be_told_is_computed_and_not_stored(
        self, engine: MakeEngine, path: str
    ) -> None:
        unknown = engine()
        for _ in range(2):
            assert self.hit(unknown, LoRARequest("unknown", 1, path)) == 0
        assert unknown.stores == []


@pytest.mark.usefixtures("files_count_as_old")
def test_where_adapters_may_leak_into_plain_requests_these_are_not_stored(
    engine: MakeEngine, tmp_path: Path
) -> None:
    """vLLM's CPU build computes a request without an adapter with that of another one
    in its batch.
    """
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    adapter = LoRARequest("tuned", 1, str(tmp_path))
    leaky = engine(caching=False)
    leaky.connector.scheduler._stores_plain = False
    prompt = make_prompt("leaks", 300)
    for request_id, changes in (
        ("plain", {}),
        ("tuned", {"lora_request": adapter}),
        ("tuned again", {"lora_request": adapter}),
    ):
        leaky.add(request_id, prompt, **changes)
        leaky.run()
    assert {store.request_id for store in leaky.stores} == {"tuned"}
    assert [load.request_id for load in leaky.loads] == ["tuned again"]


@pytest.mark.parametrize(("lora", "trusted"), [(None, True), (SimpleNamespace(), False)])
def test_adapters_leak_where_they_are_enabled_on_a_cpu(lora: object, trusted: bool) -> None:
    assert mixes_adapters(SimpleNamespace(lora_config=lora)) is not trusted
