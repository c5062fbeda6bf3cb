"""With SGLang's own callers: its cache controller and its radix tree, over a cache in the process
and over a real node.
"""

import argparse
import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvhold.core.errors import ConfigError, LayoutError, NodeError
from kvhold.integrations.sglang import KVHoldLinker, KVHoldStorage, linker, names
from kvhold.integrations.sglang.names import engine_of
from kvhold.integrations.sglang.settings import storage_settings
from kvhold.integrations.sglang.tables import SERVER_ARGS
from tests.node.nodes import RunningNode, eventually
from tests.programs import find_program, reason_without
from tests.sglang.engine import Controller, Tree
from tests.sglang.pools import (
    LAYERS,
    PAGE,
    config,
    fill,
    mha_device,
    mha_host,
    mla_device,
    mla_host,
    slots,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        find_program("g++") is None,
        reason=f"SGLang compiles its page hash at first use; {reason_without('g++')}",
    ),
]

EMBEDDED = {"embedded": True, "ram_bytes": "8MiB", "model_id": "model@1"}
TOKENS = list(range(1, 4 * PAGE + 1))
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}

DEVICES: dict[str, Callable[[], Any]] = {
    "mha": mha_device,
    "mha float32": lambda: mha_device(dtype=torch.float32),
    "mha fp8": lambda: mha_device(dtype=torch.float8_e4m3fn),
    "k and v of different widths": lambda: mha_device(v_dim=16),
    "mla": mla_device,
}


@pytest.fixture(autouse=True)
def server_args() -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    node = RunningNode(tmp_path / "node.sock")
    yield node
    node.close()


def on(node: RunningNode) -> dict[str, Any]:
    client = {
        "call_timeout_s": 60,
        "connect_timeout_s": 60,
        "arrival_timeout_s": 60,
        "reconnect_interval_s": 0.02,
    }
    return {
        "node": {"socket": str(node.path), "autostart": False},
        "client": client,
        "model_id": "model@1",
    }


def randomize(device: Any) -> None:
    for layer in range(device.layer_num):
        for buffer in {id(b): b for b in device.get_kv_buffer(layer)}.values():
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) > 0 and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


class TestController:
    @pytest.fixture
    def controllers(self) -> Iterator[list[Controller]]:
        controllers: list[Controller] = []
        yield controllers
        for controller in controllers:
            controller.close()

    @pytest.mark.parametrize("interface_v1", [0, 1])
    @pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
    @pytest.mark.parametrize("kind", ["mha", "mla"])
    def test_a_backup_is_prefetched_bit_for_bit(
        self, kind: str, layout: str, interface_v1: int, controllers: list[Controller]
    ) -> None:
        host, device = (
            (mha_host(layout), mha_device()) if kind == "mha" else (mla_host(layout), mla_device())
        )
        controller = Controller(host, device, EMBEDDED, interface_v1=interface_v1)
        controllers.append(controller)
        fill(host)
        taken = host.alloc(len(TOKENS))
        wanted = [host.get_data_page(int(slot)).clone() for slot in taken[::PAGE]]
        assert controller.backup(TOKENS, taken) == len(TOKENS)
        host.free(taken)
        fill(host)
        loaded = controller.prefetch([*TOKENS, *range(900, 900 + PAGE)])
        assert len(loaded) == len(TOKENS)
        assert equal([host.get_data_page(int(slot)) for slot in loaded[::PAGE]], wanted)
        assert len(controller.prefetch([*TOKENS[:PAGE], *range(900, 900 + PAGE)])) == PAGE
        assert len(controller.prefetch([2, *TOKENS[1:]])) == 0

    def test_two_servers_share_through_a_node_and_a_dead_node_is_a_miss(
        self, node: RunningNode, controllers: list[Controller]
    ) -> None:
        controllers += [
            Controller(mha_host(layout), mha_device(), on(node))
            for layout in ("page_first", "layer_first")
        ]
        one, other = controllers
        fill(one.host)
        taken = one.host.alloc(len(TOKENS))
        by_token = torch.stack(one.host.k_data_refs)[:, taken].clone()
        assert one.backup(TOKENS, taken) == len(TOKENS)
        loaded = other.prefetch(TOKENS)
        assert len(loaded) == len(TOKENS)
        assert torch.equal(
            torch.stack(other.host.k_data_refs)[:, loaded].view(torch.uint8),
            by_token.view(torch.uint8),
        )

        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        assert len(other.prefetch(TOKENS)) == 0
        assert one.backup(TOKENS, taken) == 0
        assert one.storage.batch_exists_v2(["00"]).kv_hit_pages == 0
        one.storage.clear()

    def test_a_node_that_comes_back_is_used_again(
        self, tmp_path: Path, controllers: list[Controller]
    ) -> None:
        first = RunningNode(tmp_path / "node.sock")
        controller = Controller(mha_host("page_first"), mha_device(), on(first))
        controllers.append(controller)
        taken = controller.host.alloc(len(TOKENS))
        assert controller.backup(TOKENS, taken) == len(TOKENS)
        first.kill()
        eventually(lambda: not controller.storage._cache.connected)
        second = RunningNode(tmp_path / "node.sock")
        try:
            eventually(lambda: controller.storage._cache.connected)
            assert len(controller.prefetch(TOKENS)) == 0
            assert controller.backup(TOKENS, taken) == len(TOKENS)
            assert len(controller.prefetch(TOKENS)) == len(TOKENS)
        finally:
            second.close()

    def test_without_a_node_sglang_does_not_attach(self, tmp_path: Path) -> None:
        section = {
            "node": {"socket": str(tmp_path / "none.sock"), "autostart": False},
            "model_id": "m",
        }
        with pytest.raises(NodeError):
            KVHoldStorage(config(section | {"embedded": False}), {})


class TestLinker:
    @pytest.fixture
    def trees(self) -> Iterator[list[Tree]]:
        trees: list[Tree] = []
        yield trees
        for tree in trees:
            tree.sglang.shutdown()

    @pytest.mark.parametrize("kind", DEVICES)
    def test_what_the_tree_offloads_is_loaded_layer_by_layer_bit_for_bit(
        self, kind: str, trees: list[Tree]
    ) -> None:
        tree = Tree(DEVICES[kind](), EMBEDDED)
        trees.append(tree)
        randomize(tree.device)
        wanted = tree.kv(tree.insert(TOKENS))
        tree.settle()
        assert tree.linker._cache.status()["chunks"] == 4 * len(tree.linker._pages.views)
        tree.forget()
        randomize(tree.device)
        request, hit = tree.match([*TOKENS, 7, 7, 7], "a")
        assert hit == len(TOKENS)
        assert tree.admit(request) == len(TOKENS)
        seen, failed = tree.run(request)
        assert equal(seen, wanted)
        assert failed == []
        assert tree.linker._cache.status()["held"] == NOTHING

    def test_only_the_part_that_the_device_lacks_is_loaded(self, trees: list[Tree]) -> None:
        tree = Tree(mha_device(), EMBEDDED)
        trees.append(tree)
        randomize(tree.device)
        wanted = [part[2 * PAGE :] for part in tree.kv(tree.insert(TOKENS))]
        tree.settle()
        tree.forget()
        tree.insert(TOKENS[: 2 * PAGE])
        request, hit = tree.match(TOKENS, "a")
        assert hit == 2 * PAGE
        tree.admit(request)
        seen, failed = tree.run(request)
        assert equal(seen, wanted)
        assert failed == []

    def test_two_requests_in_one_batch_and_one_that_is_taken_back(self, trees: list[Tree]) -> None:
        tree = Tree(mha_device(), EMBEDDED)
        trees.append(tree)
        randomize(tree.device)
        other = [token + 100 for token in TOKENS[: 2 * PAGE]]
        wanted = [
            torch.cat(parts)
            for parts in zip(
                tree.kv(tree.insert(TOKENS[: 2 * PAGE])), tree.kv(tree.insert(other)), strict=True
            )
        ]
        tree.settle()
        tree.forget()
        randomize(tree.device)
        requests = [
            tree.match(tokens, rid)[0]
            for tokens, rid in ((TOKENS, "a"), (other, "b"), (other, "c"))
        ]
        assert [tree.admit(request) for request in requests] == [2 * PAGE] * 3
        tree.sglang.linker.release_request("c")
        seen, failed = tree.run(*requests[:2])
        assert equal(seen, wanted)
        assert failed == []
        assert tree.linker._cache.status()["held"] == NOTHING

    def test_another_seed_of_the_chain_is_a_miss(self, trees: list[Tree]) -> None:
        tree = Tree(mha_device(), EMBEDDED)
        trees.append(tree)
        tree.insert(TOKENS)
        tree.settle()
        tree.forget()
        assert tree.match([5, *TOKENS[1:]], "a")[1] == 0
        assert tree.match(TOKENS, "b")[1] == len(TOKENS)

    def test_the_storage_loads_what_a_linker_offloaded(
        self, node: RunningNode, trees: list[Tree]
    ) -> None:
        tree = Tree(mha_device(), on(node))
        trees.append(tree)
        randomize(tree.device)
        taken = tree.insert(TOKENS)
        wanted = torch.stack([buffer[taken] for buffer in tree.device.k_buffer])
        tree.settle()
        controller = Controller(mha_host("page_first_direct"), mha_device(), on(node))
        try:
            loaded = controller.prefetch(TOKENS)
            assert len(loaded) == len(TOKENS)
            flat = torch.stack(controller.host.k_data_refs).reshape(LAYERS, -1, *wanted.shape[2:])
            assert torch.equal(flat[:, loaded], wanted)
        finally:
            controller.close()

    def test_a_dead_node_is_a_miss_and_an_offload_that_failed(
        self, node: RunningNode, trees: list[Tree]
    ) -> None:
        tree = Tree(mha_device(), on(node))
        trees.append(tree)
        tree.insert(TOKENS)
        tree.settle()
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        tree.forget()
        assert tree.match(TOKENS, "a")[1] == 0
        tree.insert([token + 50 for token in TOKENS])
        tree.settle()
        assert tree.sglang.linker.pending_offloads == []

    def test_a_node_that_dies_between_lookup_and_load_fails_the_requests_and_nothing_else(
        self, node: RunningNode, trees: list[Tree]
    ) -> None:
        tree = Tree(mha_device(), on(node))
        trees.append(tree)
        tree.insert(TOKENS)
        tree.settle()
        tree.forget()
        requests = [tree.match(TOKENS, rid)[0] for rid in "ab"]
        tree.admit(requests[0])
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        _, failed = tree.run(requests[0])
        # SGLang aborts it; it never continues on KV that did not come
        assert failed == [requests[0]]

    def test_a_load_whose_pages_have_gone_is_computed_instead(self, trees: list[Tree]) -> None:
        tree = Tree(mha_device(), EMBEDDED)
        trees.append(tree)
        tree.insert(TOKENS)
        tree.settle()
        tree.forget()
        free = tree.allocator.available_size()
        request, hit = tree.match(TOKENS, "a")
        assert hit == len(TOKENS)
        tree.linker._forget("a")  # as after half a minute
        tree.linker._cache.clear()
        assert tree.admit(request) == 0
        assert tree.allocator.available_size() == free

    def test_what_a_lookup_found_stays_until_it_is_loaded(self, trees: list[Tree]) -> None:
        """A cache of four pages' room: what was found is pinned, so what comes meanwhile does not
        push it out.
        """
        # 128 KiB a page
        tree = Tree(
            mha_device(layers=64, heads=16),
            {"embedded": True, "ram_bytes": "2MiB", "model_id": "m"},
        )
        trees.append(tree)
        randomize(tree.device)
        wanted = tree.kv(tree.insert(TOKENS))
        tree.settle()
        tree.forget()
        request, hit = tree.match(TOKENS, "a")
        assert hit == len(TOKENS)
        for number in range(1, 8):
            tree.insert([token + 100 * number for token in TOKENS])
            tree.settle()
            tree.forget()
        tree.admit(request)
        seen, failed = tree.run(request)
        assert equal(seen, wanted)
        assert failed == []

    def test_a_waiting_request_is_one_use_however_often_it_is_looked_up(
        self, trees: list[Tree], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree = Tree(mha_device(), EMBEDDED | {"policy": "learned"})
        trees.append(tree)
        tree.insert(TOKENS)
        tree.settle()
        tree.forget()
        policy: Any = tree.linker._cache._state.ram.policy
        (before,) = {chunk.uses for chunk in policy._chunks.values()}
        for rid in "abab":
            request, _ = tree.match(TOKENS, rid)
        assert {chunk.uses for chunk in policy._chunks.values()} == {before + 2}
        tree.linker._forget("b")  # as after half a minute
        assert tree.admit(request) == len(TOKENS)
        tree.run(request)
        assert {chunk.uses for chunk in policy._chunks.values()} == {before + 2}
        tree.forget()
        monkeypatch.setattr(linker, "_MOST_REQUESTS", 3)
        for rid in "cdeb":
            tree.match(TOKENS, rid)
        assert {chunk.uses for chunk in policy._chunks.values()} == {before + 6}
        assert len(tree.linker._asked_s) == 3

    def test_pages_that_have_left_memory_are_there_when_sglang_asks_again(
        self, trees: list[Tree], tmp_path: Path
    ) -> None:
        settings = {
            "embedded": True,
            "ram_bytes": "2MiB",
            "model_id": "m",
            "tiers": [f"disk://{tmp_path}/tier"],
        }
        tree = Tree(mha_device(layers=64, heads=16), settings)
        trees.append(tree)
        randomize(tree.device)
        wanted = tree.kv(tree.insert(TOKENS))
        for number in range(1, 8):
            tree.settle()
            assert tree.linker._cache.flush(deadline_s=60)
            tree.forget()
            tree.insert([token + 100 * number for token in TOKENS])
        tree.settle()
        tree.forget()
        request, _ = eventually(
            lambda: (found := tree.match(TOKENS, "a"))[1] == len(TOKENS) and found
        )
        tree.admit(request)
        seen, failed = tree.run(request)
        assert equal(seen, wanted)
        assert failed == []

    def test_reset_gives_everything_back(self, trees: list[Tree]) -> None:
        tree = Tree(mha_device(), EMBEDDED)
        trees.append(tree)
        tree.insert(TOKENS)
        tree.settle()
        tree.forget()
        tree.admit(tree.match(TOKENS, "a")[0])
        tree.match(TOKENS, "b")
        tree.linker.reset()
        assert tree.linker._cache.status()["held"] == NOTHING
        assert tree.linker.start_layer_wise_loading() == -1
        assert tree.match(TOKENS, "c")[1] == len(TOKENS)

    def test_with_more_ranks_than_one_a_load_is_never_refused_by_one_of_them(
        self, trees: list[Tree]
    ) -> None:
        tree = Tree(mha_device(), EMBEDDED)
        trees.append(tree)
        missing = [PoolTransfer(PoolName.KV, device_indices=slots([1]), keys=["00"])]
        assert not tree.linker.load("a", missing)
        tree.linker._one_rank = False
        assert tree.linker.load("a", missing)
        index = tree.linker.start_layer_wise_loading()
        assert not tree.linker.finish_layer_wise_loading(index)

    def test_models_whose_kv_is_not_all_of_one_kind_are_refused(self, trees: list[Tree]) -> None:
        tree = Tree(mha_device(), EMBEDDED)
        trees.append(tree)
        for components in (
            {ComponentType.FULL, ComponentType.SWA},
            {ComponentType.FULL, ComponentType.MAMBA},
        ):
            with pytest.raises(LayoutError, match="full attention only"):
                KVHoldLinker(None, tree.params, components=components, extra_config=EMBEDDED)
        tree.params.sidecar_draft_device_pools = (mha_device(),)
        with pytest.raises(LayoutError, match="draft"):
            KVHoldLinker(None, tree.params, components={ComponentType.FULL}, extra_config=EMBEDDED)
        tree.params.sidecar_draft_device_pools = ()
        tree.device.kv_cache_layout = "hnd"
        with pytest.raises(LayoutError, match="MHATokenToKVPool"):
            KVHoldLinker(None, tree.params, components={ComponentType.FULL}, extra_config=EMBEDDED)


class TestIdentity:
    @staticmethod
    def _weights(folder: Path, text: str) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 64,
        }
        (folder / "config.json").write_text(
            json.dumps(settings | {"num_attention_heads": 2, "max_position_embeddings": 128})
        )
        (folder / "model.safetensors").write_text(text)
        return str(folder)

    def _engine(self, **settings: Any) -> Any:
        set_global_server_args_for_scheduler(ServerArgs(device="cpu", **settings))
        return engine_of(storage_settings({}))

    def test_weights_and_adapters_are_told_by_content(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        path = self._weights(tmp_path / "a", "one")
        one = self._engine(model_path=path)
        assert one == self._engine(model_path=self._weights(tmp_path / "copy", "one"))
        assert one.model != self._engine(model_path=self._weights(tmp_path / "b", "two")).model
        assert one != self._engine(model_path=path, json_model_override_args='{"rope_theta": 1}')
        assert one != self._engine(model_path=path, quantization="fp8")

        adapter = self._weights(tmp_path / "adapter", "one")
        ref = LoRARef(LoRARef.deterministic_id("x", adapter), "x", adapter)
        before = self._engine(model_path=path, lora_paths=[ref])
        self._weights(tmp_path / "adapter", "other weights, same name and path: same id in SGLang")
        assert before != self._engine(model_path=path, lora_paths=[ref])
        assert self._engine(model_path=path, kv_cache_dtype="fp8_e5m2").kv_dtype == "float8_e5m2"

    def test_every_setting_of_sglangs_is_classified(self) -> None:
        """One that fails here is new: decide whether it may shape KV, and put it into tables.py."""
        assert set(ServerArgs.__struct_fields__) == SERVER_ARGS.named | SERVER_ARGS.harmless.keys()

    def test_each_named_setting_changes_the_facts_and_no_harmless_one_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        args = ServerArgs(device="cpu", model_path=self._weights(tmp_path / "a", "one"))
        settings = storage_settings({})
        before = names._server_facts(args, settings)
        for name in ServerArgs.__struct_fields__:
            value = getattr(args, name)
            other = (
                not value
                if isinstance(value, bool)
                else value + 1
                if isinstance(value, (int, float))
                else [value, "another"]
            )
            monkeypatch.setattr(args, name, other)
            assert (names._server_facts(args, settings) != before) == (name in SERVER_ARGS.named), (
                name
            )
            monkeypatch.setattr(args, name, value)
        monkeypatch.setenv("SGLANG_RUN_ID", "1")
        assert names._server_facts(args, settings) == before
        monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "1")
        assert names._server_facts(args, settings) != before

    def test_a_difference_can_be_shared(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        args = ServerArgs(device="cpu", model_path="x")
        settings = storage_settings(
            {"kvhold": {"share": ["tensor_parallel", "sglang.attention_backend"]}}
        )
        before = names._server_facts(args, settings)
        monkeypatch.setattr(args, "tp_size", 4)
        monkeypatch.setattr(args, "attention_backend", "another")
        assert names._server_facts(args, settings) == before
        with pytest.raises(ConfigError, match="share"):
            names._server_facts(args, storage_settings({"kvhold": {"share": ["version"]}}))

    def test_weights_that_cannot_be_told_are_refused(self) -> None:
        with pytest.raises(LayoutError, match="model_id"):
            self._engine(model_path="dummy")


def test_the_command_lines_in_the_documentation_are_understood_by_sglang() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    commands = [
        line
        for block in re.findall(r"```\n(.*?)```", text, re.DOTALL)
        for line in block.replace("\\\n", "").splitlines()
    ]
    launches = [shlex.split(line)[3:] for line in commands if "launch_server" in line]
    assert len(launches) == 2
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    storage, linker = (parser.parse_args(launch) for launch in launches)
    extra = json.loads(storage.hicache_storage_backend_extra_config)
    assert (storage.hicache_storage_backend, storage.hicache_write_policy, extra["class_name"]) == (
        "dynamic",
        "write_through",
        "KVHoldStorage",
    )
    assert storage_settings(extra) == storage_settings({})
    config = linker.unified_cache_external_linker_config
    config = json.loads(config) if isinstance(config, str) else config
    assert UnifiedCacheLinkerConfig.from_dict(config).linker == "KVHoldLinker"
    assert linker.unified_cache_external_linker_backend == "dynamic"
