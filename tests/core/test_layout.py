"""The bytes of a chunk: every number is stated, every layer is one range, and nothing impossible
can be stated.
"""

from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import LayoutError
from kvhold.core.layout import (
    DTYPE_BYTES,
    MOST_CHUNK_BYTES,
    MOST_CHUNK_TOKENS,
    MOST_LAYERS,
    Group,
    Layout,
)

MHA = Group(layers=32, planes=2, heads=32, head_dim=128, dtype="float16")
GQA = Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16")
MLA = Group(layers=61, planes=1, heads=1, head_dim=576, dtype="bfloat16")
FP8 = Group(layers=4, planes=2, heads=8, head_dim=64, dtype="float8_e4m3fn")
SLIDING = replace(GQA, layers=26, attention="sliding", window=1024)
STATE = Group(layers=24, planes=1, heads=1, head_dim=5000, dtype="float32", attention="state")
OPAQUE = replace(GQA, packing="engine-cpu-1", block_tokens=16, block_bytes=70_000)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    opaque = draw(st.booleans())
    window = draw(st.integers(0, 100))
    return Group(
        layers=draw(st.integers(1, 5)),
        planes=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 9)),
        head_dim=draw(st.integers(1, 33)),
        dtype=draw(st.sampled_from(list(DTYPE_BYTES))),
        attention="sliding" if window else draw(st.sampled_from(["full", "state"])),
        window=window,
        packing="engine" if opaque else "canonical",
        block_tokens=4 if opaque else 0,
        block_bytes=draw(st.integers(1, 1000)) if opaque else 0,
        rotary=draw(st.sampled_from(["", "theta=1e4"])),
    )


class TestSizes:
    @pytest.mark.parametrize(
        ("group", "num_tokens", "chunk_bytes"),
        [
            pytest.param(MHA, 256, 32 * 2 * 256 * 32 * 128 * 2, id="MHA"),
            pytest.param(GQA, 256, 32 * 2 * 256 * 8 * 128 * 2, id="GQA"),
            pytest.param(MLA, 256, 61 * 256 * 576 * 2, id="MLA"),
            pytest.param(FP8, 256, 4 * 2 * 256 * 8 * 64, id="one byte an element"),
            pytest.param(
                replace(MLA, dtype="float64"), 1, 61 * 576 * 8, id="eight bytes an element"
            ),
            pytest.param(GQA, 17, 32 * 2 * 17 * 8 * 128 * 2, id="a tail"),
            pytest.param(GQA, 1, 32 * 2 * 8 * 128 * 2, id="a tail of one token"),
            pytest.param(OPAQUE, 256, 32 * 16 * 70_000, id="opaque"),
            pytest.param(OPAQUE, 16, 32 * 70_000, id="an opaque block"),
            pytest.param(OPAQUE, 17, 32 * 2 * 70_000, id="an opaque block is whole"),
        ],
    )
    def test_a_chunk_has_the_bytes_of_its_layers_planes_tokens_and_width(
        self, group: Group, num_tokens: int, chunk_bytes: int
    ) -> None:
        layout = Layout((group,), tokens_per_chunk=256, tail_tokens=0 if group is OPAQUE else 1)
        assert layout.chunk_bytes(0, num_tokens) == chunk_bytes

    def test_each_group_has_its_own_geometry(self) -> None:
        layout = Layout((GQA, SLIDING, STATE, FP8), tokens_per_chunk=256)
        assert [layout.chunk_bytes(g, 10) for g in range(4)] == [
            32 * 2 * 10 * 8 * 128 * 2,
            26 * 2 * 10 * 8 * 128 * 2,
            24 * 1 * 10 * 5000 * 4,
            4 * 2 * 10 * 8 * 64,
        ]

    @given(st.lists(groups(), min_size=1, max_size=3), st.integers(1, 8))
    def test_the_layers_cover_a_chunk_exactly_and_in_order(
        self, some: list[Group], blocks: int
    ) -> None:
        layout = Layout(tuple(some), tokens_per_chunk=32, tail_tokens=4)
        for g, group in enumerate(some):
            end = 0
            for layer in range(group.layers):
                offset, length = layout.layer_range(g, layer, 4 * blocks)
                assert offset == end
                assert length > 0
                end += length
            assert end == layout.chunk_bytes(g, 4 * blocks)

    @pytest.mark.parametrize("layer", [-1, 32, 1000])
    def test_a_layer_that_is_not_there_has_no_range(self, layer: int) -> None:
        with pytest.raises(
            LayoutError, match=f"layer {layer} is not one of the 32 layers of group 0"
        ):
            Layout((GQA,)).layer_range(0, layer, 256)


class TestFingerprint:
    def test_every_number_and_name_of_a_group_changes_it(self) -> None:
        base = replace(OPAQUE, attention="sliding", window=64)
        other: dict[str, Any] = {
            "layers": 33,
            "planes": 1,
            "heads": 9,
            "head_dim": 64,
            "dtype": "float16",
            "window": 65,
            "packing": "engine-cpu-2",
            "block_tokens": 8,
            "block_bytes": 70_001,
            "rotary": "theta=1e6",
        }
        assert {*other, "attention"} == {f.name for f in fields(Group)}
        variants = [base, *(replace(base, **{field: value}) for field, value in other.items())]
        variants += [
            replace(base, attention=attention, window=0) for attention in ("full", "state")
        ]
        assert len({Layout((group,), 256, 16).fingerprint for group in variants}) == len(variants)

    def test_the_chunk_the_tail_and_the_order_of_groups_change_it(self) -> None:
        layouts = [
            Layout((GQA, SLIDING)),
            Layout((SLIDING, GQA)),
            Layout((GQA,)),
            Layout((GQA, GQA)),
            Layout((GQA, SLIDING), tokens_per_chunk=64),
            Layout((GQA, SLIDING), tail_tokens=0),
            Layout((GQA, SLIDING), tail_tokens=16),
        ]
        assert len({layout.fingerprint for layout in layouts}) == len(layouts)

    @given(groups(), groups())
    def test_it_is_equal_for_equal_layouts_alone(self, one: Group, other: Group) -> None:
        a, b = (Layout((group,), tokens_per_chunk=32, tail_tokens=4) for group in (one, other))
        assert (a.fingerprint == b.fingerprint) == (a == b)
        assert len(a.fingerprint) == 16


class TestBadValues:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(
                (field, value)
                for field in ("layers", "planes", "heads", "head_dim")
                for value in (0, -1)
            ),
            ("dtype", "float12"),
            ("dtype", ""),
            ("dtype", "torch.float16"),
            ("attention", "linear"),
            ("attention", ""),
            ("attention", "sliding"),  # without a window
            ("window", 64),  # without sliding
            ("window", -1),
            ("packing", ""),
            ("packing", "x" * 33),
            ("packing", "two words"),
            ("packing", "größe"),
            ("layers", MOST_LAYERS + 1),
            ("packing", "engine"),  # without its blocks
            ("block_tokens", 16),  # without a packing
            ("block_bytes", 100),
            ("block_tokens", -1),
            ("block_bytes", -1),
        ],
    )
    def test_a_bad_value_of_a_group_is_refused_and_named(self, field: str, value: Any) -> None:
        with pytest.raises(LayoutError, match=field):
            replace(GQA, **{field: value})

    @pytest.mark.parametrize("value", [0, -16])
    @pytest.mark.parametrize("field", ["block_tokens", "block_bytes"])
    def test_an_opaque_packing_has_blocks(self, field: str, value: int) -> None:
        change: dict[str, Any] = {field: value}
        with pytest.raises(LayoutError, match=field):
            replace(OPAQUE, **change)

    def test_a_sliding_group_has_a_window(self) -> None:
        with pytest.raises(LayoutError, match="window is 0"):
            replace(SLIDING, window=0)

    def test_a_layout_has_groups(self) -> None:
        with pytest.raises(LayoutError, match="at least one group"):
            Layout(())

    def test_too_many_groups_are_refused_before_they_are_read(self) -> None:
        with pytest.raises(LayoutError, match=r"257 groups.*at most 256"):
            Layout((SLIDING,) * 257)
        packed = msgspec.msgpack.encode({"groups": [None] * 50_000})
        with pytest.raises(msgspec.ValidationError, match="length <= 256"):
            msgspec.msgpack.decode(packed, type=Layout)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("tokens_per_chunk", 0),
            ("tokens_per_chunk", -256),
            ("tail_tokens", -1),
            ("tail_tokens", 3),
            ("tail_tokens", 257),
        ],
    )
    def test_a_bad_value_of_a_layout_is_refused_and_named(self, field: str, value: int) -> None:
        change: dict[str, Any] = {field: value}
        with pytest.raises(LayoutError, match=rf"{field}.*{value}"):
            replace(Layout((GQA,), tokens_per_chunk=256), **change)

    @pytest.mark.parametrize(
        ("chunk", "tail", "field"),
        [(250, 0, "tokens_per_chunk"), (256, 1, "tail_tokens"), (256, 8, "tail_tokens")],
    )
    def test_chunks_and_tails_are_whole_blocks_of_an_opaque_packing(
        self, chunk: int, tail: int, field: str
    ) -> None:
        with pytest.raises(
            LayoutError, match=rf"{field} \d+ must be a multiple of the engine's block of 16"
        ):
            Layout((GQA, OPAQUE), tokens_per_chunk=chunk, tail_tokens=tail)

    def test_a_chunk_has_no_more_bytes_than_a_frame_may(self) -> None:
        wide = Group(layers=1, planes=1, heads=1, head_dim=MOST_CHUNK_BYTES // 256, dtype="uint8")
        blocks = replace(OPAQUE, layers=1, block_bytes=MOST_CHUNK_BYTES // 16)
        for group in (wide, blocks):
            assert Layout((GQA, group), 256, 0).chunk_bytes(1, 256) == MOST_CHUNK_BYTES
            with pytest.raises(
                LayoutError,
                match=rf"a chunk of group 1 would have {2 * MOST_CHUNK_BYTES} "
                r"bytes.*tokens_per_chunk 512",
            ):
                Layout((GQA, group), 512, 0)

    def test_a_chunk_has_no_more_tokens_than_a_frame_can_say(self) -> None:
        blocks = replace(OPAQUE, block_tokens=MOST_CHUNK_TOKENS)
        assert Layout((blocks,), MOST_CHUNK_TOKENS, 0).whole_bytes == 32 * 70_000
        with pytest.raises(
            LayoutError, match=f"tokens_per_chunk is {2 * MOST_CHUNK_TOKENS}; it must be at most"
        ):
            Layout((blocks,), 2 * MOST_CHUNK_TOKENS, 0)


class TestCheckTokens:
    @pytest.mark.parametrize(
        ("tail_tokens", "allowed"),
        [(1, [1, 2, 7, 8, 255, 256]), (16, [15, 16, 240, 255, 256]), (256, [1, 256]), (0, [256])],
    )
    def test_a_chunk_is_whole_or_an_allowed_tail(
        self, tail_tokens: int, allowed: list[int]
    ) -> None:
        layout = Layout((GQA,), tokens_per_chunk=256, tail_tokens=tail_tokens)
        for num_tokens in allowed:
            layout.check_tokens(num_tokens)

    @pytest.mark.parametrize(
        ("tail_tokens", "num_tokens", "message"),
        [
            (1, 0, "hold 1 to 256"),
            (1, -5, "hold 1 to 256"),
            (1, 257, "hold 1 to 256"),
            (16, 0, "hold 1 to 256"),
            (0, 16, "this layout has none"),
        ],
    )
    def test_another_number_of_tokens_is_refused(
        self, tail_tokens: int, num_tokens: int, message: str
    ) -> None:
        with pytest.raises(LayoutError, match=message):
            Layout((GQA,), tokens_per_chunk=256, tail_tokens=tail_tokens).check_tokens(num_tokens)
