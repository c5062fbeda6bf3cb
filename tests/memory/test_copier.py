"""The copiers: the host's, and that of devices over a fake one, whose order is any that its events
allow.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvhold.core.checksums import Checksums
from kvhold.core.holdings import ABSENT, ChunkBytes
from kvhold.memory.copier import Copier, HostCopier, Piece
from kvhold.testing.device import FakeDevice, FakeEvent, fake_copier
from tests.kernels.engines import BLOCKS, Engine, arena_for, make

COPIERS: dict[str, Callable[[], Copier]] = {
    "host": HostCopier,
    "fake": lambda: fake_copier(FakeDevice(1)),
}


def piece_of(engine: Engine, blocks: list[int], sums: Checksums | None = None) -> Piece:
    """A chunk for every two of the engine's blocks."""
    tokens = [2 * engine.view.rows_per_block] * (len(blocks) // 2)
    chunks = arena_for(engine.view, tokens)
    return Piece(
        engine.view,
        np.array(blocks),
        np.asarray(chunks.base),
        ChunkBytes(chunks.offsets, chunks.num_tokens, sums),
    )


def as_read(sums: Checksums | None) -> Checksums:
    """What a reader gets of what a writer has taken."""
    assert sums is not None
    return Checksums(sums.values, np.zeros_like(sums.known))


@pytest.mark.parametrize("make_copier", COPIERS.values(), ids=COPIERS)
class TestEveryCopier:
    def test_chunks_that_were_gathered_are_scattered_to_other_blocks(
        self, make_copier: Callable[[], Copier]
    ) -> None:
        copier, engine = make_copier(), make("NHD")
        piece = piece_of(engine, [1, 2, 3, 4])
        gathered = copier.gather([piece], after=copier.mark())
        assert gathered.wait() == [None] and gathered.done()
        other = make("NHD")
        for memory in other.memory:
            memory[:] = 0
        scattered = copier.scatter(
            [Piece(other.view, piece.ids, piece.buffer, piece.places)], after=copier.mark()
        )
        copier.fence([scattered])
        assert scattered.wait() == [None]
        again = piece_of(other, [1, 2, 3, 4])
        HostCopier().gather([again], after=None)
        assert (again.buffer == piece.buffer).all()
        assert len(set(again.buffer.tolist())) > 100, "KV, not zeros"

    def test_what_is_damaged_is_told_piece_by_piece(
        self, make_copier: Callable[[], Copier]
    ) -> None:
        copier, engine = make_copier(), make("NHD")
        written = [
            piece_of(engine, [1, 2, 3, 4], Checksums.not_taken(2, engine.view.layers))
            for _ in range(2)
        ]
        HostCopier().gather(written, after=None)
        whole, damaged = (
            replace(piece, places=replace(piece.places, sums=as_read(piece.places.sums)))
            for piece in written
        )
        damaged.buffer[int(damaged.places.offsets[1]) + 5] ^= 1
        first, second = copier.scatter([whole, damaged], after=copier.mark()).wait()
        assert first is None
        assert second is not None and list(second.chunks) == [1]

    def test_places_that_are_out_of_bounds_are_refused(
        self, make_copier: Callable[[], Copier]
    ) -> None:
        copier, engine = make_copier(), make("NHD")
        piece = piece_of(engine, [0, BLOCKS])
        with pytest.raises(ValueError, match="is beyond the"):
            copier.gather([piece], after=None).wait()

    def test_a_chunk_without_a_place_is_left_out(self, make_copier: Callable[[], Copier]) -> None:
        copier, engine = make_copier(), make("NHD")
        piece = piece_of(engine, [1, 2, 3, 4])
        piece.places.offsets[0] = ABSENT
        before = piece.buffer.copy()
        copier.gather([piece], after=copier.mark()).wait()
        end = int(piece.places.offsets[1])
        assert (piece.buffer[:end] == before[:end]).all()


class TestFakeDevice:
    def test_a_stream_runs_in_its_order_and_others_in_any(self) -> None:
        orders = set()
        for seed in range(20):
            device, ran = FakeDevice(seed), list[str]()
            other = device.new_stream("other")
            for name in "ab":
                device.compute(partial(ran.append, name))
                device.put(other, partial(ran.append, name.upper()))
            assert not ran, "nothing runs by itself"
            device.synchronize()
            assert [name for name in ran if name.islower()] == ["a", "b"]
            assert [name for name in ran if name.isupper()] == ["A", "B"]
            orders.add("".join(ran))
        assert len(orders) > 3

    def test_an_event_orders_two_streams(self) -> None:
        for seed in range(20):
            device, ran = FakeDevice(seed), list[str]()
            other = device.new_stream("other")
            event = device.put(device.engine, partial(ran.append, "first"))
            device.put(other, event, partial(ran.append, "second"))
            device.synchronize()
            assert ran == ["first", "second"]

    def test_waiting_for_what_never_comes_is_an_error(self) -> None:
        device = FakeDevice(1)
        device.put(device.engine, FakeEvent(device), lambda: None)
        with pytest.raises(AssertionError, match="wait for each other"):
            device.synchronize()
        with pytest.raises(AssertionError, match="never fires"):
            device.wait(FakeEvent(device))
