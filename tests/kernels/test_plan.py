"""Plans: as few runs as there can be, and nothing out of bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import LayoutError
from kvhold.kernels import Chunks, Plan, gather, plan_blocks, plan_slots
from tests.kernels.engines import arena_for, make, slots_of

BLOCKS, TOKENS = 7, 4


def runs(plan: Plan) -> list[tuple[int, int, int, int]]:
    """(chunk, first row, slot, rows) of each run."""
    return list(
        zip(
            *(a.tolist() for a in (plan.chunk, plan.first_rows, plan.slots, plan.rows)), strict=True
        )
    )


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class TestRuns:
    """What becomes one run."""

    def test_consecutive_slots_are_one_run_up_to_the_end_of_a_block_and_of_a_chunk(self) -> None:
        view = make("HND").view
        plan = plan_slots(view, ints(1, 2, 3, 4, 5, 6, 7, 8), arena_for(view, [6, 2]))
        assert runs(plan) == [(0, 0, 1, 3), (0, 3, 4, 3), (1, 0, 7, 1), (1, 1, 8, 1)]

    def test_negative_slots_part_runs_and_are_not_in_them(self) -> None:
        view = make("HND").view
        plan = plan_slots(view, ints(-1, 0, -1, 1, 2, -5), arena_for(view, [6]))
        assert runs(plan) == [(0, 1, 0, 1), (0, 3, 1, 2)]

    def test_a_chunk_that_goes_on_where_the_last_one_ended_is_another_run(self) -> None:
        view = make("HND").view
        plan = plan_slots(view, ints(0, 1, 2, -1, -1, -1, 3), arena_for(view, [3, 4]))
        assert runs(plan) == [(0, 0, 0, 3), (1, 3, 3, 1)]

    def test_flat_pools_have_no_blocks_to_stop_at(self) -> None:
        view = make("K and V pools").view
        assert view.is_flat
        assert runs(plan_slots(view, ints(*range(2, 16)), arena_for(view, [12, 2]))) == [
            (0, 0, 2, 12),
            (1, 0, 14, 2),
        ]
        assert runs(plan_blocks(view, ints(2, 3, 5), arena_for(view, [12]))) == [
            (0, 0, 8, 8),
            (0, 8, 20, 4),
        ]

    def test_a_block_is_a_run_and_a_tail_a_part_of_one(self) -> None:
        view = make("HND").view
        assert runs(plan_blocks(view, ints(5, 2, -1, 6), arena_for(view, [8, 7]))) == [
            (0, 0, 20, 4),
            (0, 4, 8, 4),
            (1, 4, 24, 3),
        ]

    def test_opaque_blocks_are_counted_in_blocks(self) -> None:
        view = make("opaque").view
        plan = plan_blocks(view, ints(5, 2, 4), arena_for(view, [8, 4]))
        assert runs(plan) == [(0, 0, 5, 1), (0, 1, 2, 1), (1, 0, 4, 1)]
        assert plan.nbytes(2) == 2 * 3 * view.group.block_bytes

    @given(
        st.lists(st.integers(-2, BLOCKS * TOKENS - 1), max_size=30),
        st.integers(0, 30),
        st.sampled_from(["HND", "K and V pools"]),
    )
    def test_no_slot_is_lost_and_no_two_neighbours_could_be_one(
        self, slots: list[int], cut: int, kind: str
    ) -> None:
        view = make(kind).view
        cut = min(cut, len(slots))
        plan = plan_slots(view, ints(*slots), arena_for(view, [cut, len(slots) - cut]))
        assert slots_of(plan) == [slot for slot in slots if slot >= 0]
        for (chunk, row, slot, rows), (chunk2, row2, slot2, _) in zip(
            runs(plan), runs(plan)[1:], strict=False
        ):
            follows = (chunk2, row2, slot2) == (chunk, row + rows, slot + rows)
            assert not follows or (slot2 % TOKENS == 0 and not view.is_flat)

    def test_later_changes_of_the_callers_arrays_change_nothing(self) -> None:
        """Bounds are checked once, so what was checked must be what is used."""
        engine = make("HND")
        chunks = arena_for(engine.view, [1])
        slots = ints(3)
        plan = plan_slots(engine.view, slots, chunks)
        slots[0], chunks.offsets[0], chunks.num_tokens[0] = 1 << 40, 1 << 40, 1 << 40
        gather(plan)
        np.testing.assert_array_equal(
            chunks.base[128 : 128 + engine.view.row_bytes], engine.row(0, 0, 3).reshape(-1)
        )


class TestRefusals:
    """Input from outside that would touch what it should not."""

    @pytest.fixture
    def chunks(self) -> Chunks:
        return arena_for(make("HND").view, [4, 4])

    def test_slots_and_blocks_beyond_the_view(self, chunks: Chunks) -> None:
        view = make("HND").view
        with pytest.raises(ValueError, match="slot 28 is beyond the 28 slots"):
            plan_slots(view, ints(*range(21, 29)), chunks)
        with pytest.raises(ValueError, match="block id 7 is beyond the 7 blocks"):
            plan_blocks(view, ints(0, 7), chunks)
        with pytest.raises(ValueError, match=f"block id {2**62} is beyond"):
            plan_blocks(view, ints(0, 2**62), chunks)
        assert plan_blocks(view, ints(-(2**62), -(2**63)), chunks).num_runs == 0

    def test_more_or_fewer_slots_than_tokens(self, chunks: Chunks) -> None:
        view = make("HND").view
        with pytest.raises(ValueError, match="7 slots for chunks of 8 tokens"):
            plan_slots(view, ints(*range(7)), chunks)
        with pytest.raises(ValueError, match="3 block ids for chunks of 2 blocks"):
            plan_blocks(view, ints(0, 1, 2), chunks)

    @pytest.mark.parametrize(
        "wrong", [[1, 2], np.zeros(8, np.int32), np.zeros((8, 1), np.int64), np.zeros(8)]
    )
    def test_anything_but_int64s(self, chunks: Chunks, wrong: np.ndarray) -> None:
        view = make("HND").view
        with pytest.raises(ValueError, match="slots must be a numpy array of int64"):
            plan_slots(view, wrong, chunks)
        with pytest.raises(ValueError, match="block_ids must be a numpy array of int64"):
            plan_blocks(view, wrong, chunks)
        with pytest.raises(ValueError, match="offsets must be a numpy array of int64"):
            Chunks(chunks.base, wrong, chunks.num_tokens)

    @pytest.mark.parametrize(
        ("offset", "tokens"),
        [
            (-1, 4),
            (2**63 - 1, 4),
            (-(2**63), 4),
            (1, 4),
            (161, 0),
            (0, 5),
            (0, 2**62),
            (0, 2**63 - 1),
            (0, -1),
            (0, -(2**63)),
        ],
    )
    def test_chunks_outside_their_base(self, offset: int, tokens: int) -> None:
        view = make(
            "HND", head_dim=5
        ).view  # 2 layers, 2 planes, 20 bytes a token and plane: 4 tokens are 320 bytes
        chunks = Chunks(np.zeros(160 if tokens == 0 else 320, np.uint8), ints(offset), ints(tokens))
        with pytest.raises(ValueError, match="chunk"):
            plan_slots(view, ints(0, 1, 2, 3)[: max(0, min(tokens, 4))], chunks)

    def test_a_chunk_may_end_where_its_base_ends(self) -> None:
        view = make("HND", head_dim=5).view
        assert (
            plan_blocks(view, ints(0), Chunks(np.zeros(321, np.uint8), ints(1), ints(4))).num_rows
            == 4
        )
        assert (
            plan_blocks(view, ints(), Chunks(np.zeros(321, np.uint8), ints(321), ints(0))).num_rows
            == 0
        )

    def test_a_base_that_is_not_plain_bytes(self) -> None:
        for base in (
            np.zeros(64, np.int8),
            np.zeros((8, 8), np.uint8),
            np.zeros(64, np.uint8)[::2],
        ):
            with pytest.raises(ValueError, match=r"chunks\.base"):
                Chunks(base, ints(0), ints(1))
        with pytest.raises(ValueError, match="names 1 chunks"):
            Chunks(np.zeros(64, np.uint8), ints(0), ints(1, 2))

    def test_slots_of_an_opaque_packing(self) -> None:
        view = make("opaque").view
        with pytest.raises(LayoutError, match="moves whole blocks"):
            plan_slots(view, ints(0, 1, 2, 3), arena_for(view, [4]))
