"""The connector as vLLM makes it: what it refuses, what its names say, its roles, and its steps."""

import random
from collections.abc import Callable
from importlib.metadata import entry_points
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm import namespace, register
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.geometry import geometry_of
from kvhold.integrations.vllm.steps import Load, Steps, Store
from tests.vllm.engines import (
    BLOCK,
    CHUNK,
    IMPATIENT,
    MakeEngine,
    engine,
    forget_locally,
    frail,
    node,
    store,
)
from tests.vllm.scheduling import (
    Engine,
    NodeProcess,
    Options,
    make_config,
    make_folder,
    make_kv_config,
    make_prompt,
)

__all__ = ["engine", "frail", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


class TestRefusals:
    """What is not proven to come back exactly is refused at the start, with the reason."""

    def refused(
        self,
        folder: Path,
        change: Callable[[Any], None] | None = None,
        kv: KVCacheConfig | None = None,
    ) -> str:
        options = Options(folder)
        config = make_config(options, Path("unused"))
        # Of vLLM's configuration only what is asked for; the real one would refuse some of these
        # changes itself.
        view = SimpleNamespace(
            model_config=config.model_config,
            cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_layout="LBNHC"),
            parallel_config=SimpleNamespace(
                nnodes_within_dp=1,
                pipeline_parallel_size=1,
                tensor_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            speculative_config=None,
            scheduler_config=config.scheduler_config,
            load_config=config.load_config,
        )
        if change is not None:
            change(view)
        with pytest.raises(LayoutError) as caught:
            geometry_of(view, kv or make_kv_config(options), Config())
        return str(caught.value)

    @pytest.mark.parametrize(
        ("section", "name", "value", "reason"),
        [
            ("cache_config", "cache_dtype", "nvfp4", "kv_cache_dtype is nvfp4"),
            (
                "parallel_config",
                "pipeline_parallel_size",
                3,
                "2 layers are not divided evenly among 3 pipeline stages",
            ),
            ("parallel_config", "nnodes_within_dp", 2, "its workers are on 2 hosts"),
            (
                "parallel_config",
                "decode_context_parallel_size",
                2,
                "decode_context_parallel_size > 1",
            ),
            (
                "parallel_config",
                "prefill_context_parallel_size",
                2,
                "prefill_context_parallel_size > 1",
            ),
            (
                None,
                "speculative_config",
                SimpleNamespace(method="medusa"),
                "decoding by medusa; ngram, suffix, draft_model, eagle",
            ),
            (
                None,
                "speculative_config",
                SimpleNamespace(method="eagle3"),
                "by eagle3 has not been shown to be exact (allow_unproven",
            ),
            (
                None,
                "speculative_config",
                SimpleNamespace(method="eagle", num_speculative_tokens_per_batch_size=[4]),
                "does not draft in each pass",
            ),
        ],
    )
    def test_of_an_engine_that_is_set_up_otherwise(
        self, folder: Path, section: str | None, name: str, value: object, reason: str
    ) -> None:
        assert reason in self.refused(
            folder, lambda view: setattr(getattr(view, section) if section else view, name, value)
        )

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"attention_chunk_size": 128}, "attention is chunked"),
            ({"non_causal": True}, "looks ahead"),
        ],
    )
    def test_of_attention_of_another_kind(
        self, folder: Path, changes: dict[str, Any], reason: str
    ) -> None:
        assert reason in self.refused(folder, kv=make_kv_config(Options(folder), **changes))

    def test_of_groups_of_another_kind(self, folder: Path) -> None:
        one = make_kv_config(Options(folder)).kv_cache_groups[0]
        state = {"block_size": 16, "shapes": ((4, 4),), "dtypes": (torch.float32,)}
        chunked = {
            "block_size": 16,
            "num_kv_heads": 1,
            "head_size": 32,
            "dtype": torch.float32,
            "attention_chunk_size": 64,
        }
        for groups, reason in [
            (
                [one, KVCacheGroupSpec(["a"], ChunkedLocalAttentionSpec(**chunked))],
                "its layers are ChunkedLocalAttentionSpec",
            ),
            ([one, KVCacheGroupSpec(["a"], MambaSpec(**state))], "mamba_cache_mode is none"),
            (
                [KVCacheGroupSpec(one.layer_names, one.kv_cache_spec, enable_kv_transfer=False)],
                "not for transfer",
            ),
            ([], "has no KV cache"),
        ]:
            assert reason in self.refused(
                folder, kv=KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
            )

    def test_of_all_reasons_at_once(self, folder: Path) -> None:
        def change(view: Any) -> None:
            view.speculative_config = SimpleNamespace(method="medusa")
            view.parallel_config.decode_context_parallel_size = 4

        message = self.refused(
            folder, change, make_kv_config(Options(folder), attention_chunk_size=64)
        )
        assert (
            "chunked" in message
            and "decode_context_parallel_size" in message
            and "speculative" in message
        )

    def test_of_heads_that_cannot_be_divided(self, folder: Path) -> None:
        options = Options(folder)
        with pytest.raises(LayoutError, match="head_shards is 3, but 1 workers with 4 heads each"):
            geometry_of(
                make_config(options, Path("unused")),
                make_kv_config(options, num_kv_heads=4),
                Config(head_shards=3),
            )

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"tokens_per_chnk": 64}, "tokens_per_chunk"),
            ({"ram": "1GiB"}, "ram_bytes"),
            ({"client": {"call_timeout": 1}}, "client.call_timeout_s"),
            ({"policy": "lrru"}, "lru"),
            ({"tokens_per_chunk": "many"}, "whole number"),
        ],
    )
    def test_of_settings_that_are_none(
        self, folder: Path, settings: dict[str, Any], named: str
    ) -> None:
        config = make_config(Options(folder, settings=settings), Path("unused"))
        with pytest.raises(ConfigError, match=named):
            KVHoldConnector(config, KVConnectorRole.SCHEDULER, make_kv_config(Options(folder)))


class TestIdentity:
    """Whose KV it is: the same for the same weights wherever they lie, another for any others."""

    def digest(self, folder: Path, settings: Config | None = None, **changes: Any) -> bytes:
        options = Options(folder)
        config = make_config(options, Path("unused"))
        for name, value in changes.items():
            section, _, field = name.partition("__")
            setattr(getattr(config, section), field, value)
        kv = make_kv_config(options)
        geometry = geometry_of(config, kv, settings or Config())
        return namespace.namespace_of(config, kv, geometry, settings or Config()).digest

    def test_the_same_model_in_another_folder_is_the_same(self, tmp_path: Path) -> None:
        one, two = (
            make_folder(tmp_path / "one" / "llama"),
            make_folder(tmp_path / "two" / "elsewhere"),
        )
        assert self.digest(one) == self.digest(two)

    def test_one_byte_anywhere_in_the_weights_makes_another(self, tmp_path: Path) -> None:
        weights = random.Random(1).randbytes(1_000_000)
        digests = {self.digest(make_folder(tmp_path / "original", weights=weights))}
        places = [0, 4_095, 33_000, 500_001, 777_777, 999_999]
        for at in places:
            changed = weights[:at] + bytes([weights[at] ^ 1]) + weights[at + 1 :]
            digests.add(self.digest(make_folder(tmp_path / f"changed {at}", weights=changed)))
        assert len(digests) == 1 + len(places)

    def test_weights_that_changed_in_their_place_are_others(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "trained on", weights=b"before")
        before = self.digest(folder)
        (folder / "model.safetensors").write_bytes(b"after.")
        assert self.digest(folder) != before

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_theta": 500_000.0},
            {"num_hidden_layers": 3},
            {"rms_norm_eps": 1e-6},
            {"sliding_window": 7},
        ],
        ids=str,
    )
    def test_other_settings_of_the_model_make_another(
        self, tmp_path: Path, folder: Path, changes: dict[str, Any]
    ) -> None:
        assert self.digest(make_folder(tmp_path / "changed", **changes)) != self.digest(folder)

    def test_weights_that_are_not_read_from_the_folder_need_a_name(self, folder: Path) -> None:
        with pytest.raises(LayoutError, match="set model_id"):
            self.digest(folder, model_config__model_weights="s3://bucket/tuned")
        one, two = (load_config({"model_id": name}) for name in ("one", "two"))
        bucket = {"model_config__model_weights": "s3://bucket/tuned"}
        assert self.digest(folder, one, **bucket) != self.digest(folder, two, **bucket)

    def test_random_weights_are_not_those_of_the_folder(self, folder: Path) -> None:
        assert self.digest(folder, load_config__load_format="dummy") != self.digest(folder)

    def test_how_long_a_prompt_may_be_matters_only_where_it_chooses_the_rotation(
        self, tmp_path: Path, folder: Path
    ) -> None:
        assert self.digest(folder, model_config__max_model_len=100) == self.digest(folder)
        rope = {
            "rope_type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 1024,
        }
        long = make_folder(tmp_path / "longrope", rope_scaling=rope)
        assert self.digest(long, model_config__max_model_len=1024) != self.digest(
            long, model_config__max_model_len=2048
        )


class TestRegistration:
    def test_by_the_entry_point_and_its_name(self) -> None:
        (plugin,) = entry_points(group="vllm.general_plugins", name="kvhold")
        assert plugin.load() is register
        register()
        register()
        by_name = KVTransferConfig(kv_connector="KVHoldConnector", kv_role="kv_both")
        assert KVConnectorFactory.get_connector_class(by_name) is KVHoldConnector

    def test_by_the_path_of_the_module(self) -> None:
        by_path = KVTransferConfig(
            kv_connector="KVHoldConnector",
            kv_role="kv_both",
            kv_connector_module_path="kvhold.integrations.vllm",
        )
        assert KVConnectorFactory.get_connector_class(by_path) is KVHoldConnector


class TestRoles:
    """vLLM holds freed blocks back from a pass under way only for an engine that loads."""

    def test_a_producer_only_stores(self, engine: MakeEngine) -> None:
        producer = engine(role="kv_producer")
        prompt = make_prompt("producer", 300)
        store(producer, prompt)
        producer.add("a", prompt)
        producer.run()
        assert producer.loads == []
        assert producer.tokens_computed["a"] == 300 + 1
        consumer = engine(role="kv_consumer")
        consumer.add("a", prompt)
        consumer.run()
        assert consumer.tokens_computed["a"] == 300 - 288 + 1

    def test_a_producer_waits_for_no_lookup(self, folder: Path, frail: NodeProcess) -> None:
        producer = Engine(Options(folder, role="kv_producer", settings=IMPATIENT), frail.socket)
        frail.hold_up()
        request = producer.add("a", make_prompt("producer", 300))
        assert producer.step().num_scheduled_tokens == {request.request_id: 300}
        frail.go_on()
        producer.run()
        producer.close()

    def test_a_consumer_only_loads(self, engine: MakeEngine) -> None:
        consumer = engine(role="kv_consumer")
        for name in "ab":
            consumer.add(name, make_prompt("consumer", 300))
            consumer.run()
            forget_locally(consumer)
        assert (consumer.loads, consumer.stores) == ([], [])


def test_steps_cross_processes_unchanged() -> None:
    group = Group(layers=1, planes=2, heads=1, head_dim=8, dtype="float32")
    prompt = Namespace("model", Layout((group,), tokens_per_chunk=CHUNK, tail_tokens=BLOCK)).prompt(
        make_prompt("pipe", 200)
    )
    steps = Steps(
        [Load("a", 2**60, 1, [[-1, 2]])],
        [Store("b", prompt.chunks(1), [[3, 4, 5, 6, 7, 8, 9, 10]])],
    )
    one, other = Pipe()
    with one, other:
        one.send(steps)
        assert other.recv() == steps
