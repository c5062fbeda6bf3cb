"""Findings A1 to A4 and C10, on vLLM's own configuration and scheduler."""

import copy
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)

from kvhold.core.config import Config
from kvhold.core.errors import LayoutError
from kvhold.integrations.vllm import media
from kvhold.integrations.vllm.geometry import geometry_of
from tests.vllm.scheduling import (
    LAYERS,
    Engine,
    NodeProcess,
    Options,
    make_config,
    make_folder,
    make_prompt,
)

try:
    from kvhold.integrations.vllm.namespace import namespace_of
except ImportError:  # 5f474b0
    from kvhold.integrations.vllm.space import namespace_of  # type: ignore[import-not-found, no-redef]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of weights are kept in a folder of the test's own; vLLM keeps the cache it has."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", vllm.envs.VLLM_CACHE_ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return make_config(
        Options(make_folder(tmp_path_factory.mktemp("named") / "model")), Path("unused")
    )


@pytest.fixture
def config(engine_config: VllmConfig) -> VllmConfig:
    return copy.deepcopy(engine_config)


def attention() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)


def kv_of(spec: KVCacheSpec, layers: list[str] = LAYERS) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(layers), spec)]
    )


def digest(config: VllmConfig, kv: KVCacheConfig | None = None) -> bytes:
    """The namespace's, hence the beginning of every key.

    Today's `namespace_of` takes vLLM's KV cache configuration, too: it names the layers and their
    specs.
    """
    kv = kv or kv_of(attention())
    geometry = geometry_of(config, kv, Config())
    takes_kv = "kv_cache" in inspect.signature(namespace_of).parameters
    arguments = (config, kv, geometry, Config()) if takes_kv else (config, geometry, Config())
    found: bytes = namespace_of(*arguments).digest
    return found


class TestA1:
    def test_states_of_one_size_and_other_types_or_layouts_have_other_names(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of Qwen3-Next, by vLLM's own calculator."""

        def state(*dtypes: torch.dtype) -> MambaSpec:
            shapes = mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
                1, 16, 32, 128, 128, 4, 0
            )
            return MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")

        states = [state(torch.bfloat16, torch.bfloat16), state(torch.bfloat16, torch.float16)]
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)
        states.append(state(torch.bfloat16, torch.bfloat16))
        assert states[0].shapes != states[2].shapes
        assert len({digest(config, kv_of(state)) for state in states}) == 3


class TestA2:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model_config.quantization_config", QuantizationConfigArgs(linear="mxfp8")),
            ("model_config.model_impl", "transformers"),
            ("model_config.model_class_overrides", {"LlamaForCausalLM": "elsewhere:Llama"}),
            ("model_config.code_revision", "abc"),
            ("load_config.model_loader_extra_config", {"qlora_adapter_name_or_path": "x"}),
            ("parallel_config.data_parallel_size", 2),
            ("parallel_config.enable_expert_parallel", True),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_setting_that_shapes_kv_is_in_the_name(
        self, config: VllmConfig, field: str, value: Any
    ) -> None:
        before = digest(config)
        section, _, name = field.partition(".")
        object.__setattr__(getattr(config, section), name, value)
        assert digest(config) != before

    def test_the_layers_of_a_group_are_in_the_name(self, config: VllmConfig) -> None:
        """As with kv_cache_dtype_skip_layers of [0] and of [1]."""
        assert (
            len({digest(config, kv_of(attention(), ["l.0", last])) for last in ("l.1", "l.2")}) == 2
        )

    def test_the_version_of_vllm_is_in_the_name(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The packing's name has the first two numbers alone."""
        before = digest(config)
        monkeypatch.setattr(vllm, "__version__", f"{vllm.__version__}.post1")
        assert digest(config) != before


class TestA3:
    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Path:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"first")
        return folder

    @pytest.fixture
    def engine(
        self, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Engine]:
        """One that starts some seconds after the adapter was written: today newer files are not
        named at all.
        """
        node = NodeProcess(tmp_path / "node.sock")
        with monkeypatch.context() as later:
            now = time.time_ns
            later.setattr(time, "time_ns", lambda: now() + 10**10)
            engine = Engine(Options(make_folder(tmp_path / "model")), tmp_path / "node.sock")
        yield engine
        engine.close()
        node.kill()

    def test_an_adapter_replaced_in_place_stores_nothing_under_its_old_name(
        self, engine: Engine, adapter: Path
    ) -> None:
        """vLLM evicts adapters and loads them from their files again, so the KV may be of either
        state.
        """
        stored = []
        for weights in (b"first", b"retrained"):
            (adapter / "adapter_model.safetensors").write_bytes(weights)
            before = len(engine.stores)
            engine.hands.client.clear()  # so that the second request is computed and stored, too
            assert engine.scheduler.reset_prefix_cache()
            engine.add(
                weights.decode(),
                make_prompt("adapter", 300),
                lora_request=LoRARequest("tuned", 1, str(adapter)),
            )
            engine.run()
            stored.append({store.names.namespace for store in engine.stores[before:]})
        assert stored[0] != set()
        assert not stored[0] & stored[1]


class TestA4:
    def test_two_images_of_which_only_the_size_is_left_do_not_share_a_name(self) -> None:
        """With `allow_missing_mm_embeddings`.

        Content that cannot be told is refused: by an error now, by None on 5f474b0.
        """
        takes_setting = "embeddings_may_be_missing" in inspect.signature(media.Media).parameters
        told = media.Media(embeddings_may_be_missing=True) if takes_setting else media.Media()
        names = []
        for identifier in ("cat", "dog"):
            grid = SimpleNamespace(data=torch.tensor([1, 4, 4]))
            place = PlaceholderRange(offset=2, length=9)
            image = SimpleNamespace(
                identifier=identifier,
                modality="image",
                mm_position=place,
                data={"image_grid_thw": grid},
            )
            try:
                inserts = told.inserts_of(SimpleNamespace(mm_features=[image]))
            except getattr(media, "MediaError", ()):
                inserts = None
            names.append(inserts[0].digest if inserts else None)
        assert names[0] is None or names[0] != names[1]


class TestC10:
    def test_an_engine_whose_workers_are_on_several_hosts_is_refused(
        self, config: VllmConfig
    ) -> None:
        config.parallel_config.nnodes = 2
        config.parallel_config.tensor_parallel_size = 4
        with pytest.raises(LayoutError, match="hosts"):
            geometry_of(config, kv_of(attention()), Config())
