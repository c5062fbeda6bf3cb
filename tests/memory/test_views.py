"""Views say what they were told, axis by axis, and refuse, by the name of the field, what disagrees
with the group.
"""

from typing import Any

import numpy as np
import pytest
import torch

from kvhold.core.errors import LayoutError
from kvhold.core.layout import Group
from kvhold.memory.views import View, cross_layer, opaque_blocks, per_layer, separate_pools

GROUP = Group(layers=2, planes=2, heads=3, head_dim=8, dtype="bfloat16")
LATENT = Group(layers=2, planes=1, heads=1, head_dim=24, dtype="float32")
PACKED = Group(
    layers=2,
    planes=2,
    heads=3,
    head_dim=8,
    dtype="float32",
    packing="cpu-attn",
    block_tokens=4,
    block_bytes=3 * 4 * 16 * 4,
)
BLOCKS, TOKENS = 5, 4
NHD = "plane block token head dim"


def two(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(2)]


def geometry(view: View) -> tuple[int, int, int, int, int]:
    """Slots, slots a block, and the strides of block, row and head in bytes."""
    return view.num_rows, view.rows_per_block, view.block_stride, view.row_stride, view.head_stride


class TestWhatAViewSays:
    def test_nhd(self) -> None:
        kv = two(2, BLOCKS, TOKENS, 3, 8)
        view = per_layer(GROUP, kv, axes=NHD)
        assert geometry(view) == (20, 4, 192, 48, 16)
        assert view.table.tolist() == [[t.data_ptr(), t[1].data_ptr()] for t in kv]
        assert (view.device, view.num_blocks, view.tokens_per_block, view.row_bytes) == (
            "cpu",
            5,
            4,
            48,
        )
        assert view.runs_are_whole and view.is_flat

    def test_hnd_whose_rows_are_in_pieces(self) -> None:
        view = per_layer(GROUP, two(2, BLOCKS, 3, TOKENS, 8), axes="plane block head token dim")
        assert geometry(view) == (20, 4, 192, 16, 64)
        assert not view.rows_are_whole and not view.is_flat

    def test_planes_inside_blocks_are_whole_runs_that_do_not_cross_blocks(self) -> None:
        kv = two(BLOCKS, 2, TOKENS, 3, 8)
        view = per_layer(GROUP, kv, axes=("block", "plane", "token", "head", "dim"))
        assert geometry(view) == (20, 4, 384, 48, 16)
        assert view.table.tolist() == [[t.data_ptr(), t[0, 1].data_ptr()] for t in kv]
        assert view.runs_are_whole and not view.is_flat

    def test_a_permuted_tensor_is_the_tensor_it_was(self) -> None:
        kv = two(2, BLOCKS, 3, TOKENS, 8)
        straight = per_layer(GROUP, kv, axes="plane block head token dim")
        permuted = per_layer(GROUP, [t.permute(0, 1, 3, 2, 4) for t in kv], axes=NHD)
        assert geometry(straight) == geometry(permuted)
        assert straight.table.tolist() == permuted.table.tolist()

    def test_a_slice_of_a_wider_tensor(self) -> None:
        kv = [t[..., 2:10] for t in two(2, BLOCKS, TOKENS, 3, 16)]
        view = per_layer(GROUP, kv, axes=NHD)
        assert geometry(view) == (20, 4, 384, 96, 32)
        assert view.table[0, 0] == kv[0].data_ptr()
        assert view.head_bytes == 16 and not view.rows_are_whole

    def test_cross_layer(self) -> None:
        kv = torch.zeros(BLOCKS, 2, 2, TOKENS, 3, 8, dtype=torch.bfloat16)
        view = cross_layer(GROUP, kv, axes="block layer plane token head dim")
        assert geometry(view) == (20, 4, 768, 48, 16)
        assert view.table.tolist() == [
            [kv[0, layer, plane].data_ptr() for plane in range(2)] for layer in range(2)
        ]

    def test_separate_pools_of_slots(self) -> None:
        k, v = two(24, 3, 8), two(24, 3, 8)
        view = separate_pools(GROUP, [k, v], axes="slot head dim", tokens_per_block=6)
        assert geometry(view) == (24, 6, 288, 48, 16)
        assert view.num_blocks == 4
        assert view.table.tolist() == [
            [a.data_ptr(), b.data_ptr()] for a, b in zip(k, v, strict=True)
        ]

    def test_a_cache_without_pages_is_a_block_a_sequence(self) -> None:
        view = separate_pools(
            GROUP, [two(1, 3, 9, 8), two(1, 3, 9, 8)], axes="block head token dim"
        )
        assert geometry(view) == (9, 9, 144, 16, 144)
        assert view.is_flat

    def test_mla(self) -> None:
        kv = two(BLOCKS, TOKENS, 24, dtype=torch.float32)
        view = per_layer(LATENT, kv, axes="block token dim")
        assert geometry(view) == (20, 4, 384, 96, 96)
        assert view.table.tolist() == [[t.data_ptr()] for t in kv]

    def test_axes_of_one_may_be_named_whatever_their_stride(self) -> None:
        kv = [
            t.as_strided((1, 20, 1, 24), (7, 24, 5, 1))
            for t in two(BLOCKS, TOKENS, 24, dtype=torch.float32)
        ]
        view = per_layer(LATENT, kv, axes="plane slot head dim", tokens_per_block=4)
        assert geometry(view) == (20, 4, 384, 96, 96)
        assert view.rows_are_whole

    def test_opaque_blocks(self) -> None:
        kv = two(BLOCKS, 3, TOKENS, 16, dtype=torch.float32)
        view = opaque_blocks(PACKED, kv, block_axis=0)
        assert geometry(view) == (5, 1, 768, 768, 768)
        assert view.table.shape == (2, 1)
        assert (view.num_blocks, view.tokens_per_block, view.planes, view.row_bytes) == (
            5,
            4,
            1,
            768,
        )

    def test_opaque_blocks_whose_axes_are_named_in_another_order_than_they_lie(self) -> None:
        kv = [t.permute(1, 0, 3, 2) for t in two(BLOCKS, 3, TOKENS, 16, dtype=torch.float32)]
        assert opaque_blocks(PACKED, kv, block_axis=1).block_stride == 768

    def test_opaque_blocks_with_gaps_between_them(self) -> None:
        kv = [t[:, 1] for t in two(BLOCKS, 2, 3, TOKENS, 16, dtype=torch.float32)]
        view = opaque_blocks(PACKED, kv, block_axis=0)
        assert view.block_stride == 1536 and not view.is_flat

    def test_numpy_arrays_and_bits_held_in_unsigned_integers(self) -> None:
        kv = [np.zeros((2, BLOCKS, TOKENS, 3, 8), np.uint16) for _ in range(2)]
        view = per_layer(GROUP, kv, axes=NHD)
        assert view.table[1, 1] == kv[1][1].ctypes.data and view.writable
        kv[0].setflags(write=False)
        assert not per_layer(GROUP, kv, axes=NHD).writable
        fp8 = Group(layers=2, planes=2, heads=3, head_dim=8, dtype="float8_e4m3fn")
        assert (
            per_layer(fp8, two(2, BLOCKS, TOKENS, 3, 8, dtype=torch.uint8), axes=NHD).row_bytes
            == 24
        )
        assert (
            per_layer(
                fp8, two(2, BLOCKS, TOKENS, 3, 8, dtype=torch.float8_e4m3fn), axes=NHD
            ).row_bytes
            == 24
        )

    def test_it_keeps_the_tensors(self) -> None:
        k, v = two(24, 3, 8), two(24, 3, 8)
        view = separate_pools(GROUP, [k, v], axes="slot head dim", tokens_per_block=1)
        assert [list(map(id, planes)) for planes in view.owners] == [
            [id(k[0]), id(v[0])],
            [id(k[1]), id(v[1])],
        ]

    def test_its_table_cannot_be_changed(self) -> None:
        with pytest.raises(ValueError, match="read-only"):
            per_layer(GROUP, two(2, BLOCKS, TOKENS, 3, 8), axes=NHD).table[0, 0] = 0

    def test_an_engine_without_a_single_block(self) -> None:
        assert per_layer(GROUP, two(2, 0, TOKENS, 3, 8), axes=NHD).num_blocks == 0


class TestRefusals:
    """Each names the field that is wrong."""

    @pytest.mark.parametrize(
        ("shape", "axes", "named"),
        [
            ((2, BLOCKS, TOKENS, 3, 8), "plane block token dim", "axes: 4 named"),
            ((2, BLOCKS, TOKENS, 3, 8), "plane block token head width", "axes: 'width'"),
            ((2, BLOCKS, TOKENS, 3, 8), "layer block token head dim", "axes: 'layer'"),
            (
                (2, BLOCKS, TOKENS, 3, 8),
                "plane block block head dim",
                "axes: 'block' is named twice",
            ),
            ((2, BLOCKS, TOKENS, 3, 8), "plane block slot head dim", "axes: name either slot"),
            ((2, TOKENS, 3, 8), "plane token head dim", "axes: name either slot"),
            ((2, BLOCKS, 3, 8), "plane block head dim", "axes: name either slot"),
            ((2, BLOCKS, TOKENS, 3), "plane block token head", "axes: dim is missing"),
            (
                (3, BLOCKS, TOKENS, 3, 8),
                NHD,
                "group.planes is 2; axis plane of the tensor of layer 0 has 3",
            ),
            (
                (BLOCKS, TOKENS, 3, 8),
                "block token head dim",
                "group.planes is 2; axis plane .* has no entry",
            ),
            ((2, BLOCKS, TOKENS, 4, 8), NHD, "group.heads is 3; axis head .* has 4"),
            (
                (2, BLOCKS, TOKENS, 8),
                "plane block token dim",
                "group.heads is 3; axis head .* has no entry",
            ),
            ((2, BLOCKS, TOKENS, 3, 16), NHD, "group.head_dim is 8; axis dim .* has 16"),
            ((2, BLOCKS, 0, 3, 8), NHD, "tokens_per_block is None; axis token has 0"),
            ((2, 20, 3, 8), "plane slot head dim", "tokens_per_block must be given"),
        ],
    )
    def test_shapes_and_names(self, shape: tuple[int, ...], axes: str, named: str) -> None:
        with pytest.raises(LayoutError, match=named):
            per_layer(GROUP, two(*shape), axes=axes)

    @pytest.mark.parametrize(
        ("tokens_per_block", "axes", "shape"),
        [
            (5, NHD, (2, BLOCKS, TOKENS, 3, 8)),
            (7, "plane slot head dim", (2, 20, 3, 8)),
            (0, "plane slot head dim", (2, 20, 3, 8)),
        ],
    )
    def test_tokens_per_block(
        self, tokens_per_block: int, axes: str, shape: tuple[int, ...]
    ) -> None:
        with pytest.raises(LayoutError, match="tokens_per_block"):
            per_layer(GROUP, two(*shape), axes=axes, tokens_per_block=tokens_per_block)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.int16, torch.uint8, torch.float32])
    def test_dtype(self, dtype: torch.dtype) -> None:
        with pytest.raises(LayoutError, match=r"group\.dtype is bfloat16"):
            per_layer(GROUP, two(2, BLOCKS, TOKENS, 3, 8, dtype=dtype), axes=NHD)

    def test_a_dim_that_is_not_contiguous(self) -> None:
        with pytest.raises(LayoutError, match="dim of the tensor of layer 0 is not contiguous"):
            per_layer(GROUP, [t[..., ::2] for t in two(2, BLOCKS, TOKENS, 3, 16)], axes=NHD)

    def test_an_expanded_tensor_whose_tokens_are_one(self) -> None:
        kv = [t.expand(2, BLOCKS, TOKENS, 3, 8) for t in two(2, BLOCKS, 1, 3, 8)]
        with pytest.raises(
            LayoutError, match="token of the tensor of layer 0 has 4 entries at one address"
        ):
            per_layer(GROUP, kv, axes=NHD)

    def test_the_number_of_layers(self) -> None:
        kv = two(2, BLOCKS, TOKENS, 3, 8)
        for tensors in (kv[:1], [*kv, kv[0]], []):
            with pytest.raises(LayoutError, match=r"layers: \d tensors given, group.layers is 2"):
                per_layer(GROUP, tensors, axes=NHD)
        with pytest.raises(
            LayoutError, match=r"group\.layers is 2; axis layer of the cross-layer tensor has 3"
        ):
            cross_layer(
                GROUP,
                torch.zeros(3, 2, BLOCKS, TOKENS, 3, 8, dtype=torch.bfloat16),
                axes="layer plane block token head dim",
            )
        with pytest.raises(LayoutError, match="layers: plane 1 has 1 tensors"):
            separate_pools(
                GROUP, [two(24, 3, 8), two(24, 3, 8)[:1]], axes="slot head dim", tokens_per_block=1
            )

    def test_the_number_of_pools(self) -> None:
        with pytest.raises(LayoutError, match=r"planes: 1 pools given, group\.planes is 2"):
            separate_pools(GROUP, [two(24, 3, 8)], axes="slot head dim", tokens_per_block=1)

    def test_layers_that_differ(self) -> None:
        one, other = (
            torch.zeros(2, BLOCKS, TOKENS, 3, 8, dtype=torch.bfloat16),
            torch.zeros(2, BLOCKS, 3, TOKENS, 8, dtype=torch.bfloat16),
        )
        with pytest.raises(
            LayoutError,
            match="strides: axis token of the tensor of layer 1 steps 16 bytes, that of the "
            "tensor of layer 0 48",
        ):
            per_layer(GROUP, [one, other.transpose(2, 3)], axes=NHD)
        with pytest.raises(LayoutError, match="sizes: the tensor of layer 1"):
            per_layer(
                GROUP,
                [one, torch.zeros(2, BLOCKS + 1, TOKENS, 3, 8, dtype=torch.bfloat16)],
                axes=NHD,
            )
        with pytest.raises(LayoutError, match="device: the tensor of layer 1 has meta"):
            per_layer(GROUP, [one, one.to("meta")], axes=NHD)

    def test_a_packing_and_the_wrong_constructor(self) -> None:
        with pytest.raises(LayoutError, match=r"group\.packing is 'cpu-attn'"):
            per_layer(PACKED, two(2, BLOCKS, TOKENS, 3, 8, dtype=torch.float32), axes=NHD)
        with pytest.raises(LayoutError, match=r"group\.packing is canonical"):
            opaque_blocks(GROUP, two(BLOCKS, 3, TOKENS, 16), block_axis=0)

    @pytest.mark.parametrize(
        ("tensors", "block_axis", "named"),
        [
            (
                lambda: two(BLOCKS, 3, TOKENS, 17, dtype=torch.float32),
                0,
                "group.block_bytes is 768; a block .* has 816 bytes",
            ),
            (
                lambda: [t[..., :16] for t in two(BLOCKS, 3, TOKENS, 17, dtype=torch.float32)],
                0,
                "group.block_bytes: .* not contiguous",
            ),
            (
                lambda: two(3, BLOCKS, TOKENS, 16, dtype=torch.float32),
                1,
                "group.block_bytes: .* not contiguous",
            ),
            (lambda: two(BLOCKS, 3, TOKENS, 16, dtype=torch.float32), 4, "block_axis is 4"),
            (lambda: two(BLOCKS, 3, TOKENS, 16), 0, "group.dtype is float32"),
            (
                lambda: two(BLOCKS, 3, TOKENS, 16, dtype=torch.float32)[:1],
                0,
                "layers: 1 tensors given",
            ),
        ],
    )
    def test_opaque_blocks(self, tensors: Any, block_axis: int, named: str) -> None:
        with pytest.raises(LayoutError, match=named):
            opaque_blocks(PACKED, tensors(), block_axis=block_axis)
