"""What `kvhold size` says of a model is what the connector stores of it in vLLM."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch
import transformers
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvhold.core.config import Config
from kvhold.core.layout import Group
from kvhold.integrations.vllm.geometry import geometry_of
from kvhold.sizing.model import kv_of, read_settings
from kvhold_lab.checkpoints.recipes import RECIPES
from tests.vllm.scheduling import Options, make_config, make_folder

pytestmark = pytest.mark.vllm

BLOCK = 32


def spec_of(
    model: ModelConfig, parallel: ParallelConfig, group: Group
) -> FullAttentionSpec | SlidingWindowSpec:
    """The KV of a layer, by vLLM's own account of the model's heads."""
    size, dtype = model.get_head_size(), torch.float32
    if model.use_mla:
        return MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=dtype, max_tp_shards=1
        )
    heads = model.get_num_kv_heads(parallel)
    if group.window:
        return SlidingWindowSpec(
            block_size=BLOCK,
            num_kv_heads=heads,
            head_size=size,
            dtype=dtype,
            sliding_window=group.window,
        )
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=size, dtype=dtype)


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return make_config(Options(make_folder(tmp_path / "other")), Path("unused"))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "qwen3-moe", "gemma3", "gpt-oss", "deepseek-v2"]
)
def test_a_chunk_has_as_many_bytes_as_its_settings_say(
    name: str, tp: int, config: VllmConfig, tmp_path: Path
) -> None:
    settings = getattr(transformers, RECIPES[name].config)(**RECIPES[name].settings)
    settings.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)].__name__]
    settings.save_pretrained(tmp_path / "model")
    model = ModelConfig(model=str(tmp_path / "model"), dtype="float32", skip_tokenizer_init=True)
    kv = kv_of(read_settings(str(tmp_path / "model")), dtype="float32")
    assert sum(group.layers for group in kv.groups) == model.get_num_layers(ParallelConfig())

    parallel = config.parallel_config
    parallel.tensor_parallel_size = tp
    copies = tp if model.use_mla else max(1, tp // 2)  # two KV heads
    groups = [
        KVCacheGroupSpec(
            [f"layers.{number}.{i}" for i in range(group.layers)], spec_of(model, parallel, group)
        )
        for number, group in enumerate(kv.groups)
    ]
    kv_cache = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups, kv_tp_replicas=copies
    )
    geometry = geometry_of(config, kv_cache, Config(tokens_per_chunk=BLOCK, allow_unproven=True))
    shard_bytes = sum(geometry.layout.chunk_bytes(number, BLOCK) for number in range(len(groups)))
    assert kv.stored_bytes(BLOCK) == geometry.shards * shard_bytes
    if all(not group.window for group in kv.groups):
        assert kv.rank_bytes(BLOCK, tp) == geometry.per_worker * shard_bytes
