"""Which worker holds what, and that copies are proven before they are used."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationMode
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    MambaSpec,
)

from kvhold.core.config import Config, RulesConfig
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.holdings import ABSENT, ChunkBytes
from kvhold.core.keys import Namespace
from kvhold.core.layout import packing_name
from kvhold.integrations.vllm import geometry, shown
from kvhold.integrations.vllm.copy_selftest import head_splits, prove, prove_coding
from kvhold.integrations.vllm.geometry import Part, preferred_layout
from kvhold.integrations.vllm.hosts import hosts_of, named_by_hosts, place_of
from kvhold.integrations.vllm.namespace import namespace_of
from kvhold.integrations.vllm.shown import backends_not_shown, judge, not_shown
from kvhold.integrations.vllm.worker import _check_covered
from kvhold.memory.coding import coded_view
from kvhold.memory.copier import Ended, HostCopier, Mark, Piece
from kvhold.memory.views import View, opaque_blocks
from tests.vllm.scheduling import Options, make_config, make_folder
from tests.vllm.specs import BLOCKS, full, groups, latent, layer, of_width, sliding, state

pytestmark = pytest.mark.vllm


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return make_config(Options(make_folder(tmp_path / "model")), Path("unused"))


@pytest.fixture
def gpu(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Only the configuration: nothing here runs on a GPU."""
    for module in (geometry, shown):
        monkeypatch.setattr(module, "device_of_kv", lambda: "cuda")
    monkeypatch.setattr(shown, "capability", lambda: (9, 0))
    config.cache_config.kv_cache_layout = "LBNHC"
    config.compilation_config.mode = CompilationMode.NONE
    return config


class TestShards:
    def test_each_worker_holds_and_stores_its_own(self, config: VllmConfig) -> None:
        geometry = of_width(config, 4, groups(full(num_kv_heads=1)))
        assert geometry.shards == 4
        assert [list(geometry.held_by(rank)) for rank in range(4)] == [[0], [1], [2], [3]]
        assert [list(geometry.stored_by(rank)) for rank in range(4)] == [[0], [1], [2], [3]]

    def test_a_stage_holds_other_layers(self, config: VllmConfig) -> None:
        geometry = of_width(config, 2, groups(full(num_kv_heads=2)), stages=2)
        assert [list(geometry.held_by(rank)) for rank in range(4)] == [[0], [1], [2], [3]]

    def test_what_all_workers_hold_alike_is_stored_once_and_loaded_by_all(
        self, gpu: VllmConfig
    ) -> None:
        geometry = of_width(gpu, 4, groups(latent(), copies=4), allow_unproven=True)
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
        spaces = {
            namespace_of(config, kv, of_width(config, width, kv), Config()).digest
            for width, kv in kinds
        }
        assert len(spaces) == 3

    def test_without_them_latents_of_other_widths_share_nothing(self, gpu: VllmConfig) -> None:
        settings = Config(allow_unproven=True)
        spaces = set()
        for width in (1, 2):
            kv = groups(latent(), copies=width)
            made = of_width(gpu, width, kv, allow_unproven=True)
            spaces.add(namespace_of(gpu, kv, made, settings).digest)
        assert len(spaces) == 2

    def test_a_latent_is_not_divided(self, gpu: VllmConfig) -> None:
        kv = groups(latent(), copies=2)
        assert of_width(gpu, 2, kv, head_shards=4, allow_unproven=True).shards == 1


class TestHosts:
    def test_an_engine_whose_workers_are_on_several_hosts_is_refused(
        self, config: VllmConfig
    ) -> None:
        config.parallel_config.nnodes = 2
        with pytest.raises(LayoutError, match="on 2 hosts"):
            of_width(config, 4, groups(full(num_kv_heads=1)))

    def test_engines_of_one_service_may_be_on_several_hosts_where_each_is_on_one(
        self, config: VllmConfig
    ) -> None:
        """Data parallel: their workers share nothing."""
        parallel = config.parallel_config
        parallel.nnodes, parallel.data_parallel_size, parallel.data_parallel_size_local = 2, 2, 1
        assert of_width(config, 2, groups(full(num_kv_heads=2))).shards == 2

    def test_workers_that_find_another_node_than_the_scheduler_are_refused(
        self, config: VllmConfig, tmp_path: Path
    ) -> None:
        geometry = of_width(config, 2, groups(full(num_kv_heads=2)))
        (tmp_path / "other").mkdir()
        here, other = place_of(tmp_path / "node.sock"), place_of(tmp_path / "other" / "node.sock")
        (host,) = hosts_of(here, {(0, 0): here, (1, 0): here}, geometry)
        assert host.is_own and host.ranks == (0, 2)
        with pytest.raises(
            LayoutError,
            match=r"worker 1 of stage 0 finds its node in another folder .*other.* span\.listen",
        ):
            hosts_of(here, {(0, 0): here, (0, 1): other}, geometry)
        with pytest.raises(LayoutError, match="worker 0 of stage 1 is on another host"):
            hosts_of(here, {(1, 0): replace(here, boot="of another host")}, geometry)
        relaying = replace(other, relay="10.0.0.5:1", layout=geometry.layout.fingerprint)
        first, second = hosts_of(here, {(0, 0): here, (0, 1): relaying}, geometry)
        assert (first.is_own, first.ranks) == (True, (0,))
        assert (second.is_own, second.ranks, second.shards(geometry)) == (False, (1,), (1,))
        with pytest.raises(LayoutError, match="arranges its KV in another way"):
            hosts_of(here, {(0, 0): here, (0, 1): replace(relaying, layout=b"x")}, geometry)
        with pytest.raises(LayoutError, match="1 of the engine's 2 shards"):
            hosts_of(here, {(0, 1): relaying}, geometry)

    def test_of_workers_with_equal_kv_the_first_on_each_host_stores(
        self, config: VllmConfig, tmp_path: Path
    ) -> None:
        geometry = of_width(config, 4, groups(full(num_kv_heads=1), copies=4))
        here = place_of(tmp_path / "node.sock")
        there = replace(here, boot="another", relay="10.0.0.5:1")
        places = {(0, rank): here if rank < 2 else there for rank in range(4)}
        hosts = hosts_of(here, places, geometry)
        assert [host.ranks for host in hosts] == [(0, 1), (2, 3)]
        assert [host.shards(geometry) for host in hosts] == [(0,), (0,)]
        assert [list(host.storers(geometry)) for host in hosts] == [[0], [2]]

    def test_what_differs_between_the_hosts_is_part_of_the_name(
        self, config: VllmConfig, tmp_path: Path
    ) -> None:
        geometry = of_width(config, 2, groups(full(num_kv_heads=2)))
        space = Namespace(model="model", layout=geometry.layout, shards=2)
        here = replace(place_of(tmp_path / "node.sock"), facts=(("weights", "a"), ("cpu", "x")))

        def named(**changes: Any) -> Namespace:
            there = replace(here, **({"boot": "another", "relay": "b:1"} | changes))
            hosts = hosts_of(here, {(0, 0): here, (0, 1): there}, geometry)
            return named_by_hosts(space, hosts, geometry)

        assert named() == space
        other = named(facts=(("weights", "b"), ("cpu", "x")))
        assert dict(other.facts.items) == {"hosts.1.weights": "b"}
        assert other.digest != space.digest
        there = replace(here, boot="another", relay="b:1")
        (only,) = hosts_of(here, {(0, 0): there, (0, 1): there}, geometry)
        names = dict(named_by_hosts(space, [only], geometry).facts.items)
        assert names == {"hosts.0,1.weights": "a", "hosts.0,1.cpu": "x"}


class TestParts:
    def test_windows_and_full_attention_are_parts_of_one_layout(self, config: VllmConfig) -> None:
        geometry = of_width(config, 1, groups(sliding(), full(block_size=32)), tokens_per_chunk=40)
        assert [
            (part.group.attention, part.group.window, part.group.block_tokens)
            for part in geometry.parts
        ] == [
            ("sliding", 40, 16),
            ("full", 0, 32),
        ]
        assert (geometry.layout.tokens_per_chunk, geometry.layout.tail_tokens) == (64, 32)
        assert not geometry.whole_prompt_fits

    def test_a_state_makes_the_chunk_one_block_without_tails(self, config: VllmConfig) -> None:
        state = MambaSpec(
            block_size=64,
            shapes=((3, 5), (7,)),
            dtypes=(torch.float32, torch.bfloat16),
            mamba_cache_mode="align",
        )
        geometry = of_width(config, 1, groups(state, full(block_size=32)))
        assert (geometry.layout.tokens_per_chunk, geometry.layout.tail_tokens) == (64, 0)
        assert geometry.parts[0].group.block_bytes == 3 * 5 * 4 + 7 * 2
        assert not geometry.whole_prompt_fits

    @pytest.mark.parametrize(("unit", "is_refused"), [(None, True), (16, True), (64, False)])
    def test_states_that_vllm_keeps_between_blocks_are_refused(
        self, config: VllmConfig, unit: int | None, is_refused: bool
    ) -> None:
        """Mamba2 keeps a checkpoint at the last unit of a prompt, in the slot of a block's end."""
        state = MambaSpec(
            block_size=64,
            shapes=((3, 5),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=1,
            prefill_checkpoint_alignment=1,
        )
        config.cache_config.prefix_match_unit = unit
        attention = full(block_size=64 if unit else 32)
        if not is_refused:
            assert of_width(config, 1, groups(state, attention)).layout.tokens_per_chunk == 64
            return
        with pytest.raises(LayoutError, match="it keeps states between blocks' ends"):
            of_width(config, 1, groups(state, attention))

    def test_a_long_name_of_a_packing_is_not_cut_to_that_of_another(self) -> None:
        names = [f"vllm-0.32-state-a_very_long_kind_of_state_{end}" for end in "ab"]
        assert len({packing_name(name) for name in names}) == 2
        assert all(len(packing_name(name)) == 32 for name in names)
        assert packing_name("vllm-0.32-state-mamba2") == "vllm-0.32-state-mamba2"

    def test_mla_on_cpus_is_refused_until_the_user_allows_it(self, config: VllmConfig) -> None:
        with pytest.raises(
            LayoutError, match="gives other answers when a prompt continues cached KV"
        ):
            of_width(config, 1, groups(latent()))
        assert of_width(config, 1, groups(latent()), allow_unproven=True).shards == 1

    def test_mla_that_cannot_go_on_from_loaded_kv_is_refused(self, gpu: VllmConfig) -> None:
        gpu.scheduler_config.enable_chunked_prefill = False
        with pytest.raises(LayoutError, match="without the loaded KV"):
            of_width(gpu, 1, groups(latent()), allow_unproven=True)
        assert of_width(gpu, 1, groups(full()), allow_unproven=True).whole_prompt_fits

    def test_kv_of_another_type_is_another_namespace(
        self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # without it vLLM has no fp8 KV
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
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
    def test_what_is_seen_rightly_passes_and_leaves_zeros(
        self, config: VllmConfig, shards: int
    ) -> None:
        part = of_width(config, 1, groups(full()), head_shards=shards).parts[0]
        tensors = self.tensors()
        prove(
            part,
            tensors,
            [
                opaque_blocks(part.group, head_split, block_axis=0)
                for head_split in head_splits(tensors, shards)
            ],
            HostCopier(),
        )
        assert not any(tensor.any() for tensor in tensors)

    @pytest.mark.parametrize(
        "tensor_of",
        [lambda t: t.transpose(1, 2), lambda t: t.permute(0, 3, 1, 2)],
        ids=["NHD", "any order"],
    )
    def test_the_order_of_axes_does_not_matter(self, part: Part, tensor_of: Any) -> None:
        tensors = [tensor_of(tensor) for tensor in self.tensors()]
        prove(part, tensors, [opaque_blocks(part.group, tensors, block_axis=0)], HostCopier())

    def test_layers_in_another_order_are_found(self, part: Part) -> None:
        tensors = self.tensors()
        with pytest.raises(LayoutError, match="gathered bytes are not those"):
            prove(
                part,
                tensors,
                [opaque_blocks(part.group, tensors[::-1], block_axis=0)],
                HostCopier(),
            )

    def test_a_view_of_other_memory_is_found(self, part: Part) -> None:
        with pytest.raises(LayoutError, match="KV cache group 0"):
            prove(
                part,
                self.tensors(),
                [opaque_blocks(part.group, self.tensors(), block_axis=0)],
                HostCopier(),
            )

    def test_a_copy_that_goes_beside_its_blocks_is_found(self, part: Part) -> None:
        class Beside(HostCopier):
            def scatter(
                self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
            ) -> Ended:
                return super().scatter(
                    [replace(piece, ids=(piece.ids + 1) % BLOCKS) for piece in pieces],
                    after,
                    layers=layers,
                )

        tensors = self.tensors()
        with pytest.raises(
            LayoutError, match=r"did not come back as it was|though it was not copied"
        ):
            prove(part, tensors, [opaque_blocks(part.group, tensors, block_axis=0)], Beside())

    def test_a_small_pool(self, part: Part) -> None:
        for count in (1, 2, 3):
            tensors = [tensor[:count].contiguous() for tensor in self.tensors()]
            prove(part, tensors, [opaque_blocks(part.group, tensors, block_axis=0)], HostCopier())


class TestCoded:
    """`memory_codec`: the groups of chunks are not those of tensors."""

    def test_groups_of_keys_and_values_are_coded_and_no_others(self, config: VllmConfig) -> None:
        kv = groups(full(dtype=torch.bfloat16), sliding(dtype=torch.bfloat16))
        plain, coded = of_width(config, 1, kv), of_width(config, 1, kv, memory_codec="int8")
        for before, after in zip(plain.parts, coded.parts, strict=True):
            assert after.engine_group == before.group
            assert after.group.packing == before.group.packing + "+int8"
            assert after.group.block_bytes < 0.57 * before.group.block_bytes
        assert coded.layout.groups == tuple(part.group for part in coded.parts)
        digests = {namespace_of(config, kv, found, Config()).digest for found in (plain, coded)}
        assert len(digests) == 2, "who keeps KV as it is never finds what was coded"
        of_8_bits = of_width(config, 1, groups(full(dtype=torch.uint8)), memory_codec="int8").parts[
            0
        ]
        assert of_8_bits.group == of_8_bits.engine_group

    def test_settings_that_allow_no_loss_are_refused(self, config: VllmConfig) -> None:
        for max_error in (0.0, 0.007):
            with pytest.raises(
                LayoutError,
                match=r"memory_codec is int8, which loses up to 0\.0079 .* rules\.max_error allows",
            ):
                of_width(
                    config,
                    1,
                    groups(full()),
                    memory_codec="int8",
                    rules=RulesConfig(max_error=max_error),
                )
        of_width(config, 1, groups(full()), memory_codec="int8", rules=RulesConfig(max_error=0.01))

    @pytest.mark.parametrize(
        ("wrong", "says"), [("gather", "encode differently"), ("scatter", "decode differently")]
    )
    def test_a_device_that_makes_other_bits_is_found(
        self, config: VllmConfig, wrong: str, says: str
    ) -> None:
        class Other(HostCopier):
            """One bit of a chunk, or of a block, differs."""

            def gather(
                self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
            ) -> Ended:
                ended = super().gather(pieces, after, layers=layers)
                pieces[0].buffer[5] ^= wrong == "gather"
                return ended

            def scatter(
                self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
            ) -> Ended:
                ended = super().scatter(pieces, after, layers=layers)
                tensors[1][int(pieces[0].ids[0])].view(torch.uint8).view(-1)[3] ^= (
                    wrong == "scatter"
                )
                return ended

        part = of_width(config, 1, groups(full()), memory_codec="int8").parts[0]
        tensors = [tensor.contiguous() for tensor in torch.zeros(2, BLOCKS, 4, 16, 64)]
        views = [coded_view(opaque_blocks(part.engine_group, tensors, block_axis=0), "int8")]
        prove_coding(part, tensors, views, HostCopier())
        assert not any(tensor.any() for tensor in tensors)
        with pytest.raises(LayoutError, match=says):
            prove_coding(part, tensors, views, Other())


def test_a_block_that_waits_for_bytes_the_hit_does_not_have_is_a_failed_load(
    config: VllmConfig,
) -> None:
    part = of_width(config, 1, groups(sliding(), full()), tokens_per_chunk=32).parts[0]
    places = ChunkBytes(np.array([ABSENT, 64]), np.array([32, 16]))
    _check_covered(part, np.array([-1, -1, 7]), places)
    with pytest.raises(KVHoldError, match="no KV for 1 blocks of KV cache group 0"):
        _check_covered(part, np.array([-1, 5, 7]), places)


def test_views_of_shards_are_slices_of_the_heads(config: VllmConfig) -> None:
    part = of_width(config, 1, groups(full()), head_shards=2).parts[0]
    tensor = torch.zeros(BLOCKS, 4, 16, 64)
    views: list[View] = [
        opaque_blocks(part.group, head_split, block_axis=0)
        for head_split in head_splits([tensor, tensor], 2)
    ]
    assert [int(view.table[0, 0]) - tensor.data_ptr() for view in views] == [0, 2 * 16 * 64 * 4]


class TestOnAGpu:
    """The configuration alone: nothing here ran on a GPU."""

    def test_what_was_shown_is_served(self, gpu: VllmConfig) -> None:
        found = of_width(gpu, 1, groups(full(), sliding(), latent()))
        version = ".".join(vllm.__version__.split(".")[:2])
        assert [part.group.packing for part in found.parts] == [
            f"vllm-{version}-cuda-LBNHC",
            f"vllm-{version}-cuda-LBNHC",
            f"vllm-{version}-cuda-mla-LBNHC",
        ]

    @pytest.mark.parametrize(
        ("place", "value", "told"),
        [
            ("compilation_config.mode", CompilationMode.VLLM_COMPILE, "compiled passes"),
            ("parallel_config.world_size", 2, "several GPUs"),
            ("model_config.enable_sleep_mode", True, "sleep mode"),
            ("cache_config.kv_cache_layout", "BLHNC", "KV arranged as BLHNC"),
            ("cache_config.cache_dtype", "fp8_e5m2", "kv_cache_dtype fp8_e5m2"),
            ("attention_config.flash_attn_version", 2, "FlashAttention 2"),
        ],
    )
    def test_what_was_not_is_refused_until_the_user_allows_it(
        self, gpu: VllmConfig, place: str, value: Any, told: str
    ) -> None:
        holder, name = place.split(".")
        object.__setattr__(getattr(gpu, holder), name, value)
        with pytest.raises(
            LayoutError, match=rf"nothing was shown for {told}.* \(allow_unproven = true"
        ):
            of_width(gpu, 1, groups(full()))
        of_width(gpu, 1, groups(full()), allow_unproven=True)

    def test_another_gpu_or_device_is_refused(
        self, gpu: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for version, told in (((8, 0), "compute capability 8.0"), (None, "the device cuda")):
            monkeypatch.setattr(shown, "capability", lambda version=version: version)
            with pytest.raises(LayoutError, match=f"nothing was shown for .*{told}"):
                of_width(gpu, 1, groups(full()))

    def test_another_release_of_vllm_is_refused(
        self, gpu: VllmConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vllm.__version__", "0.31.0")
        with pytest.raises(LayoutError, match=r"nothing was shown for vLLM 0\.31\.0"):
            of_width(gpu, 1, groups(full()))

    def test_states_coded_memory_and_drafters_need_the_user(self, gpu: VllmConfig) -> None:
        assert not not_shown(gpu, [state(MambaAttentionBackendEnum.SHORT_CONV)], Config())
        assert not_shown(gpu, [state(MambaAttentionBackendEnum.MAMBA2)], Config()) == [
            "states of mamba2"
        ]
        assert not_shown(gpu, [full()], Config(memory_codec="int8")) == ["memory_codec int8"]
        gpu.speculative_config = SimpleNamespace(method="eagle")
        assert not_shown(gpu, [full()], Config()) == ["speculation by eagle"]

    def test_a_worker_refuses_the_backend_that_vllm_chose(self, gpu: VllmConfig) -> None:
        layers = gpu.compilation_config.static_forward_context
        layers.update(first=layer("FLASH_ATTN"), second=layer("SHORT_CONV_ATTN"))
        judge(backends_not_shown(gpu), Config())
        layers["third"] = layer("FLASHINFER")
        with pytest.raises(LayoutError, match="the attention backend FLASHINFER"):
            judge(backends_not_shown(gpu), Config())
        judge(backends_not_shown(gpu), Config(allow_unproven=True))

    @pytest.mark.parametrize(
        ("layout", "is_served"),
        [("BLHNC", True), ("LBHNC", True), ("LHBNC", False), ("BHLNC", False)],
    )
    def test_a_block_of_a_layer_must_be_one_piece(
        self, gpu: VllmConfig, layout: str, is_served: bool
    ) -> None:
        gpu.cache_config.kv_cache_layout = layout
        if is_served:
            assert (
                layout
                in of_width(gpu, 1, groups(full()), allow_unproven=True).parts[0].group.packing
            )
        else:
            with pytest.raises(LayoutError, match=f"arranged as {layout}"):
                of_width(gpu, 1, groups(full()), allow_unproven=True)

    def test_heads_outside_tokens_are_asked_for_where_they_are_divided(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert preferred_layout(Config(head_shards=4)) is None, "the CPU's backend has no other"
        monkeypatch.setattr(geometry, "device_of_kv", lambda: "cuda")
        assert preferred_layout(Config(head_shards=4)) == "LBHNC"
        assert preferred_layout(Config()) is None
