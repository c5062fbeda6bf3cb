"""Which worker holds what, and that copies are proven before they are used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvhold.core.api import ABSENT, ChunkBytes
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.integrations.vllm.geometry import Geometry, Part, _fitting, geometry_of
from kvhold.integrations.vllm.hosts import check_places, place_of
from kvhold.integrations.vllm.proof import lots, prove
from kvhold.integrations.vllm.space import namespace_of
from kvhold.integrations.vllm.worker import _check_covered
from kvhold.memory import copier
from kvhold.memory.copier import HostCopier
from kvhold.memory.views import View, opaque_blocks
from tests.vllm.scheduling import Options, make_config, make_folder

pytestmark = pytest.mark.vllm

BLOCKS = 12


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return make_config(Options(make_folder(tmp_path / "model")), Path("unused"))


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**({"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32} | changes))


def sliding(window: int = 40, **changes: Any) -> SlidingWindowSpec:
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32, "sliding_window": window} | changes
    return SlidingWindowSpec(**fields)


def latent() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=96, dtype=torch.float32, max_tp_shards=1)


def groups(*specs: Any, copies: int = 1) -> KVCacheConfig:
    made = [KVCacheGroupSpec([f"layers.{number}.{i}" for i in range(2)], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=made, kv_tp_replicas=copies)


def of_width(config: VllmConfig, width: int, kv: KVCacheConfig, *, stages: int = 1, **settings: Any) -> Geometry:
    config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = width, stages
    return geometry_of(config, kv, Config(**settings))


class TestShards:
    def test_each_worker_holds_and_stores_its_own(self, config: VllmConfig) -> None:
        geometry = of_width(config, 4, groups(full(num_kv_heads=1)))
        assert geometry.shards == 4
        assert [list(geometry.held_by(rank)) for rank in range(4)] == [[0], [1], [2], [3]]
        assert [list(geometry.stored_by(rank)) for rank in range(4)] == [[0], [1], [2], [3]]

    def test_a_stage_holds_other_layers(self, config: VllmConfig) -> None:
        geometry = of_width(config, 2, groups(full(num_kv_heads=2)), stages=2)
        assert [list(geometry.held_by(rank)) for rank in range(4)] == [[0], [1], [2], [3]]

    def test_what_all_workers_hold_alike_is_stored_once_and_loaded_by_all(self, config: VllmConfig) -> None:
        geometry = of_width(config, 4, groups(latent(), copies=4))
        assert (geometry.shards, geometry.parts[0].group.planes) == (1, 1)
        assert [list(geometry.held_by(rank)) for rank in range(4)] == [[0]] * 4
        assert [list(geometry.stored_by(rank)) for rank in range(4)] == [[0], [], [], []]

    def test_fewer_heads_than_workers(self, config: VllmConfig) -> None:
        geometry = of_width(config, 4, groups(full(num_kv_heads=1), copies=2))
        assert [list(geometry.held_by(rank)) for rank in range(4)] == [[0], [0], [1], [1]]
        assert [list(geometry.stored_by(rank)) for rank in range(4)] == [[0], [], [1], []]

    def test_head_shards_are_the_same_for_engines_of_any_width(self, config: VllmConfig) -> None:
        spaces, layouts, held = set(), set(), {}
        for width in (1, 2, 4):
            settings = Config(head_shards=4)
            kv = groups(full(num_kv_heads=8 // width))
            geometry = of_width(config, width, kv, head_shards=4)
            spaces.add(namespace_of(config, kv, geometry, settings).digest)
            layouts.add(geometry.layout)
            held[width] = [list(geometry.held_by(rank)) for rank in range(width)]
        assert len(spaces) == len(layouts) == 1
        assert held == {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 4: [[0], [1], [2], [3]]}

    def test_without_them_engines_of_other_widths_share_nothing(self, config: VllmConfig) -> None:
        """Another width adds up in another order: its KV is not the same to the bit."""
        kinds = [(width, groups(full(num_kv_heads=8 // width))) for width in (1, 2, 4)]
        kinds += [(width, groups(latent(), copies=width)) for width in (1, 2)]
        spaces = {namespace_of(config, kv, of_width(config, width, kv), Config()).digest for width, kv in kinds}
        assert len(spaces) == 5

    def test_a_latent_is_not_divided(self, config: VllmConfig) -> None:
        assert of_width(config, 2, groups(latent(), copies=2), head_shards=4).shards == 1


class TestHosts:
    def test_an_engine_whose_workers_are_on_several_hosts_is_refused(self, config: VllmConfig) -> None:
        config.parallel_config.nnodes = 2
        with pytest.raises(LayoutError, match="on 2 hosts"):
            of_width(config, 4, groups(full(num_kv_heads=1)))

    def test_engines_of_one_service_may_be_on_several_hosts_where_each_is_on_one(self, config: VllmConfig) -> None:
        """Data parallel: their workers share nothing."""
        parallel = config.parallel_config
        parallel.nnodes, parallel.data_parallel_size, parallel.data_parallel_size_local = 2, 2, 1
        assert of_width(config, 2, groups(full(num_kv_heads=2))).shards == 2

    def test_workers_that_find_another_node_than_the_scheduler_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        here, other = place_of(tmp_path / "node.sock"), place_of(tmp_path / "other" / "node.sock")
        check_places(here, {(0, 0): here, (1, 0): here})
        with pytest.raises(LayoutError, match=r"worker 1 of stage 0 finds its node in another folder .*other"):
            check_places(here, {(0, 0): here, (0, 1): other})
        with pytest.raises(LayoutError, match="worker 0 of stage 1 is on another host"):
            check_places(here, {(1, 0): replace(here, boot="of another host")})


class TestParts:
    def test_windows_and_full_attention_are_parts_of_one_layout(self, config: VllmConfig) -> None:
        geometry = of_width(config, 1, groups(sliding(), full(block_size=32)), tokens_per_chunk=40)
        assert [(part.group.attention, part.group.window, part.group.block_tokens) for part in geometry.parts] == [
            ("sliding", 40, 16),
            ("full", 0, 32),
        ]
        assert (geometry.layout.tokens_per_chunk, geometry.layout.tail_tokens) == (64, 32)
        assert not geometry.whole_prompt_fits

    def test_a_state_makes_the_chunk_one_block_without_tails(self, config: VllmConfig) -> None:
        state = MambaSpec(block_size=64, shapes=((3, 5), (7,)), dtypes=(torch.float32, torch.bfloat16), mamba_cache_mode="align")
        geometry = of_width(config, 1, groups(state, full(block_size=32)))
        assert (geometry.layout.tokens_per_chunk, geometry.layout.tail_tokens) == (64, 0)
        assert geometry.parts[0].group.block_bytes == 3 * 5 * 4 + 7 * 2
        assert not geometry.whole_prompt_fits

    def test_a_long_name_of_a_packing_is_not_cut_to_that_of_another(self) -> None:
        names = [f"vllm-0.32-state-a_very_long_kind_of_state_{end}" for end in "ab"]
        assert len({_fitting(name) for name in names}) == 2
        assert all(len(_fitting(name)) == 32 for name in names)
        assert _fitting("vllm-0.32-state-mamba2") == "vllm-0.32-state-mamba2"

    def test_mla_that_cannot_go_on_from_loaded_kv_is_refused(self, config: VllmConfig) -> None:
        config.scheduler_config.enable_chunked_prefill = False
        with pytest.raises(LayoutError, match="without what was loaded"):
            of_width(config, 1, groups(latent()))
        assert of_width(config, 1, groups(full())).whole_prompt_fits

    def test_kv_of_another_type_is_another_namespace(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)  # without it vLLM has no fp8 KV
        digests = set()
        for kind in ("auto", "fp8", "fp8_e5m2"):
            config.cache_config.cache_dtype = kind
            kv = groups(full(dtype=torch.uint8))
            digests.add(namespace_of(config, kv, of_width(config, 1, kv), Config()).digest)
        assert len(digests) == 3


class TestProof:
    @pytest.fixture
    def part(self, config: VllmConfig) -> Part:
        return of_width(config, 1, groups(full())).parts[0]

    def tensors(self) -> list[torch.Tensor]:
        """Two layers over one allocation, as vLLM lays them."""
        pool = torch.zeros(2, BLOCKS, 4, 16, 64)
        return [pool[0], pool[1]]

    @pytest.mark.parametrize("shards", [1, 2, 4])
    def test_what_is_seen_rightly_passes_and_leaves_zeros(self, config: VllmConfig, shards: int) -> None:
        part = of_width(config, 1, groups(full()), head_shards=shards).parts[0]
        tensors = self.tensors()
        prove(part, tensors, [opaque_blocks(part.group, lot, block_axis=0) for lot in lots(tensors, shards)], HostCopier())
        assert not any(tensor.any() for tensor in tensors)

    @pytest.mark.parametrize("tensor_of", [lambda t: t.transpose(1, 2), lambda t: t.permute(0, 3, 1, 2)], ids=["NHD", "any order"])
    def test_the_order_of_axes_does_not_matter(self, part: Part, tensor_of: Any) -> None:
        tensors = [tensor_of(tensor) for tensor in self.tensors()]
        prove(part, tensors, [opaque_blocks(part.group, tensors, block_axis=0)], HostCopier())

    def test_layers_in_another_order_are_found(self, part: Part) -> None:
        tensors = self.tensors()
        with pytest.raises(LayoutError, match="gathered bytes are not those"):
            prove(part, tensors, [opaque_blocks(part.group, tensors[::-1], block_axis=0)], HostCopier())

    def test_a_view_of_other_memory_is_found(self, part: Part) -> None:
        with pytest.raises(LayoutError, match="KV cache group 0"):
            prove(part, self.tensors(), [opaque_blocks(part.group, self.tensors(), block_axis=0)], HostCopier())

    def test_a_copy_that_goes_beside_its_blocks_is_found(self, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
        real = copier.scatter_blocks
        monkeypatch.setattr(copier, "scatter_blocks", lambda view, blocks, *rest, **how: real(view, (blocks + 1) % BLOCKS, *rest, **how))
        tensors = self.tensors()
        with pytest.raises(LayoutError, match=r"did not come back as it was|though it was not copied"):
            prove(part, tensors, [opaque_blocks(part.group, tensors, block_axis=0)], HostCopier())

    def test_a_small_pool(self, part: Part) -> None:
        for count in (1, 2, 3):
            tensors = [tensor[:count].contiguous() for tensor in self.tensors()]
            prove(part, tensors, [opaque_blocks(part.group, tensors, block_axis=0)], HostCopier())


def test_a_block_that_waits_for_bytes_the_hit_does_not_have_is_a_failed_load(config: VllmConfig) -> None:
    part = of_width(config, 1, groups(sliding(), full()), tokens_per_chunk=32).parts[0]
    places = ChunkBytes(np.array([ABSENT, 64]), np.array([32, 16]))
    _check_covered(part, np.array([-1, -1, 7]), places)
    with pytest.raises(KVHoldError, match="no KV for 1 blocks of KV cache group 0"):
        _check_covered(part, np.array([-1, 5, 7]), places)


def test_views_of_shards_are_slices_of_the_heads(config: VllmConfig) -> None:
    part = of_width(config, 1, groups(full()), head_shards=2).parts[0]
    tensor = torch.zeros(BLOCKS, 4, 16, 64)
    views: list[View] = [opaque_blocks(part.group, lot, block_axis=0) for lot in lots([tensor, tensor], 2)]
    assert [int(view.table[0, 0]) - tensor.data_ptr() for view in views] == [0, 2 * 16 * 64 * 4]
