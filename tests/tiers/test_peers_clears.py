"""Clears at peers: what was cleared is not found there."""

import asyncio
from pathlib import Path

import pytest

from kvhold.core.metrics import Metrics
from kvhold.testing.tier import make_key
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.peers import clear_numbers
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from tests.tiers.peer_places import (
    PATIENT_S,
    SPACE,
    eventually,
    eventually_found,
    following,
    served,
)

pytestmark = pytest.mark.asyncio


class TestClears:
    """A clear of this host holds for what its peers still have."""

    async def test_a_cleared_chunk_of_a_peer_is_not_found(self) -> None:
        async with served() as place, following(place.port) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            tier.advance(SPACE)
            assert await tier.probe([make_key(1)]) == [None]
            assert await tier.get([make_key(1)], [[memoryview(bytearray(1))]]) == [None]

    @pytest.mark.parametrize("prefix", [SPACE, b""], ids=["namespace", "everything"])
    async def test_it_is_found_again_when_the_peer_has_cleared_too(self, prefix: bytes) -> None:
        async with served() as place, following(place.port) as tier:
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            tier.advance(prefix)
            place.remove(make_key(1))
            place.numbers.learn(prefix, tier.numbers[prefix])
            place.put(make_key(2), b"after")
            await asyncio.sleep(0.05)
            assert await tier.probe([make_key(2)]) == [None]  # it was not announced
            place.numbers.announce(prefix)
            await eventually_found(tier, make_key(2), 5)

    async def test_another_namespace_is_not_touched(self) -> None:
        other = b"o" * 16
        async with served() as place, following(place.port) as tier:
            place.put(make_key(1, other), b"x")
            await eventually_found(tier, make_key(1, other), 1)
            tier.advance(SPACE)
            assert await tier.probe([make_key(1, other)]) == [1]

    @pytest.mark.parametrize("when", ["before it follows", "later"])
    async def test_a_peers_clear_is_learned_once(self, when: str) -> None:
        learned: list[bytes] = []
        async with served() as place, following(place.port) as tier:
            tier.keep_clears(learned.append, None)
            if when == "later":
                await tier.check()
            place.numbers.advance(SPACE)
            place.numbers.announce(SPACE)
            await tier.check()
            await eventually(lambda: learned == [SPACE])
            assert tier.numbers == place.numbers.numbers
            place.numbers.announce(SPACE)
            place.put(make_key(1), b"x")
            await eventually_found(tier, make_key(1), 1)
            assert learned == [SPACE]

    async def test_clears_of_the_last_run_hold(self) -> None:
        async with served() as place, following(place.port) as tier:
            tier.keep_clears(lambda prefix: None, {SPACE: 5})
            place.put(make_key(1), b"x")
            await tier.check()
            await eventually(lambda: tier.num_chunks == 1)
            assert await tier.probe([make_key(1)]) == [None]

    async def test_a_clear_that_the_last_run_did_not_end_is_announced(self, tmp_path: Path) -> None:
        journal = ClearsJournal(tmp_path / "clears")
        journal.begin(["peers"])
        await journal.add("peers", SPACE)
        async with served() as place, following(place.port) as tier:
            guard = Guard(tier, GuardConfig(), name="peers", metrics=Metrics(), place="peers")
            guard.share(lambda prefix: None, journal)
            guard.resume_clears(journal)
            await eventually(lambda: not journal.pending("peers"))
            assert tier.clear_numbers.announced.keys() == {SPACE}
            assert tier.clear_numbers.announced == tier.numbers
            await guard.close()
        await journal.close(PATIENT_S)

    async def test_a_number_is_larger_than_any_known(self) -> None:
        numbers = ClearNumbers(clock=lambda: 1.0)
        assert numbers.advance(SPACE) == 1000
        assert numbers.advance(SPACE) == 1001
        assert numbers.learn(SPACE, 5000)
        assert not numbers.learn(SPACE, 5000)
        assert numbers.advance(SPACE) == 5001

    async def test_a_clear_is_as_old_as_its_request_and_not_as_the_end_of_its_transfers(
        self,
    ) -> None:
        now_s = 9.0
        async with served() as place, following(place.port) as tier:
            guard = Guard(tier, GuardConfig(), name="peers", metrics=Metrics())
            tier.clear_numbers = ClearNumbers(clock=lambda: now_s)
            pending = [await guard.begin_clear(SPACE, asked_s) for asked_s in (1.0, 3.0)]
            await guard.end_clear(pending[0])
            assert tier.numbers == {SPACE: 1000}
            # a chunk that was stored here at 2.0 is older than this clear
            assert tier.clear_numbers.learn(SPACE, 2500)
            await guard.end_clear(pending[1])
            assert tier.numbers == {SPACE: 3000}
            await guard.end_clear(await guard.begin_clear(SPACE))
            assert tier.numbers == {SPACE: 9000}
            await guard.close()

    async def test_the_clears_of_a_peer_have_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clear_numbers, "MOST_NUMBERS", 10)
        async with served() as place, following(place.port) as tier:
            await tier.check()
            for number in range(30):
                place.numbers.advance(prefix := b"%016d" % number)
                place.numbers.announce(prefix)
            last = [b"%016d" % number for number in range(20, 30)]
            await eventually(lambda: list(tier.peers[0].clears) == last)
            place.numbers.advance(b"")
            place.numbers.announce(b"")
            await eventually(lambda: b"" in tier.peers[0].clears)

    async def test_many_clears_let_other_tasks_run(self) -> None:
        learned: list[bytes] = []
        async with served() as place, following(place.port) as tier:
            tier.keep_clears(learned.append, None)
            for number in range(3_000):
                place.numbers.advance(prefix := b"%016d" % number)
                place.numbers.announce(prefix)
            seen = set[int]()

            async def watch() -> None:
                while True:
                    seen.add(len(learned))
                    await asyncio.sleep(0)

            watching = asyncio.ensure_future(watch())
            await tier.check()
            await eventually(lambda: len(learned) == 3_000)
            watching.cancel()
            assert {500, 1_000, 2_500} <= seen

    @pytest.mark.parametrize(("prefix", "number"), [(b"short", 1), (SPACE, 0), (SPACE, 1 << 62)])
    async def test_an_impossible_clear_is_refused(self, prefix: bytes, number: int) -> None:
        with pytest.raises(ValueError, match="a clear of"):
            ClearNumbers().learn(prefix, number)
