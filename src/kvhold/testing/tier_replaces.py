import asyncio
from itertools import pairwise
from typing import Any

import pytest

from kvhold.core.errors import TierError, TierFull
from kvhold.core.turns import next_turn
from kvhold.testing.tier import fetch, make_key, make_value, overwrite, scanned, store
from kvhold.tiers.base import Tier, replace


class TierReplaces:
    """Skipped for a tier that cannot replace values."""

    too_large_bytes: int | None = None
    """A size that the tier must refuse for lack of room; None: there is no limit."""

    @pytest.fixture
    def replacing(self, tier: Any) -> Any:
        if not tier.traits.replaces:
            pytest.skip("this tier cannot replace a value")
        return tier

    async def test_a_tier_that_cannot_replace_says_so_and_changes_nothing(self, tier: Tier) -> None:
        if tier.traits.replaces:
            pytest.skip("this tier can replace a value")
        await store(tier, {make_key(1): b"old"})
        with pytest.raises(TierError, match="cannot replace a value in one step"):
            await replace(tier, [(make_key(1), [memoryview(b"new")])])
        assert await fetch(tier, [make_key(1)], [3]) == [b"old"]

    @pytest.mark.parametrize(
        ("before", "after"),
        [(1, 1), (1_000, 1_000), (1_000, 7), (7, 4_096), (100_001, 3_000_001), (3_000_001, 511)],
    )
    async def test_a_replaced_value_is_the_new_one_and_no_byte_of_the_old(
        self, replacing: Tier, before: int, after: int
    ) -> None:
        key, value = make_key(1), make_value(2, after)
        await store(replacing, {key: make_value(1, before), make_key(2): b"another"})
        assert await overwrite(replacing, {key: value}) == [True]
        assert await replacing.probe([key]) == [after]
        assert await fetch(replacing, [key, make_key(2)], [max(before, after), 7]) == [
            value,
            b"another",
        ]
        assert await scanned(replacing) == sorted([key, make_key(2)])
        assert await replacing.delete([key]) == [True]
        assert await replacing.probe([key]) == [None]

    async def test_a_value_that_was_replaced_is_kept_like_any_other(self, replacing: Tier) -> None:
        key = make_key(1)
        await store(replacing, {key: b"first"})
        for generation in range(5):
            value = make_value(generation, 10_000 >> generation)
            assert await overwrite(replacing, {key: value}) == [True]
            assert await store(replacing, {key: b"a put"}) == [True]
            assert await fetch(replacing, [key], [10_000]) == [value]

    async def test_what_is_not_there_is_not_made_by_replacing(self, replacing: Tier) -> None:
        values = {make_key(i): make_value(i, 1_000 + i) for i in range(6)}
        await store(replacing, {key: b"old" for i, key in enumerate(values) if i % 2})
        assert await overwrite(replacing, values) == [i % 2 == 1 for i in range(6)]
        assert await fetch(replacing, list(values), [2_000] * 6) == [
            v if i % 2 else None for i, v in enumerate(values.values())
        ]
        await replacing.delete(list(values))
        assert await overwrite(replacing, values) == [False] * 6
        assert await scanned(replacing) == []
        assert await replace(replacing, []) == []

    async def test_of_a_key_twice_in_one_replace_the_first_counts(self, replacing: Tier) -> None:
        key, first = make_key(1), make_value(1, 3_000)
        await store(replacing, {key: b"old"})
        assert await replace(
            replacing, [(key, [memoryview(first)]), (key, [memoryview(b"second")])]
        ) == [True, True]
        assert await fetch(replacing, [key], [3_000]) == [first]

    async def test_a_replacement_may_come_in_parts_and_is_copied(self, replacing: Tier) -> None:
        value = make_value(1, 20_000)
        mine = [bytearray(value[a:b]) for a, b in pairwise([0, 1, 1, 4_097, 12_000, 20_000])]
        await store(replacing, {make_key(1): b"old"})
        assert await replace(replacing, [(make_key(1), [memoryview(part) for part in mine])]) == [
            True
        ]
        for part in mine:
            part[:] = bytes(len(part))
        assert await fetch(replacing, [make_key(1)], [20_000]) == [value]

    async def test_readers_meanwhile_have_the_old_value_or_the_new_one_whole(
        self, replacing: Tier
    ) -> None:
        key = make_key(1)
        values = [
            make_value(i, nbytes)
            for i, nbytes in enumerate(
                (100_000, 60_000, 130_001, 4_000, 100_000, 70_000, 4_001, 131_072)
            )
        ]
        await store(replacing, {key: values[0]})
        over = asyncio.Event()

        async def read() -> list[bytes | None]:
            seen = []
            while not over.is_set():
                seen += await fetch(replacing, [key], [200_000])
                assert None not in await replacing.probe([key])
                await next_turn()
            return seen

        async def write() -> None:
            for value in values[1:]:
                assert await overwrite(replacing, {key: value}) == [True]
                for _ in range(5):
                    await next_turn()
            over.set()

        *reads, _ = await asyncio.gather(*(read() for _ in range(4)), write())
        assert all(value in values for seen in reads if seen is not None for value in seen)
        assert await fetch(replacing, [key], [200_000]) == [values[-1]]

    async def test_what_is_deleted_while_it_is_replaced_is_gone(self, replacing: Tier) -> None:
        keys = [make_key(i) for i in range(8)]
        for turns in range(4):
            await store(replacing, dict.fromkeys(keys, make_value(0, 50_000)))

            async def remove(turns: int = turns) -> None:
                for _ in range(turns):
                    await next_turn()
                await replacing.delete(keys)

            await asyncio.gather(
                *(overwrite(replacing, {key: make_value(1, 60_000)}) for key in keys), remove()
            )
            assert await replacing.probe(keys) == [None] * 8
            assert await scanned(replacing) == []

    async def test_a_cancelled_replace_leaves_the_old_value_or_the_new_one(
        self, replacing: Tier
    ) -> None:
        old, new = make_value(1, 400_000), make_value(2, 500_000)
        for turns in range(8):
            key, mine = make_key(turns), bytearray(new)
            await store(replacing, {key: old})
            call = asyncio.ensure_future(replace(replacing, [(key, [memoryview(mine)])]))
            for _ in range(turns):
                await next_turn()
            call.cancel()
            await asyncio.wait((call,))
            mine[:] = bytes(500_000)
            assert await fetch(replacing, [key], [500_000]) in ([old], [new])

    async def test_a_replacement_without_room_loses_itself_alone(self, replacing: Tier) -> None:
        if self.too_large_bytes is None:
            pytest.skip("this tier takes a value of any size")
        values = {make_key(i): make_value(i, 1_000) for i in range(3)}
        await store(replacing, values)
        new = [
            memoryview(make_value(9, 2_000)),
            memoryview(bytes(self.too_large_bytes)),
            memoryview(make_value(8, 2_000)),
        ]
        done = await replace(
            replacing, [(key, [value]) for key, value in zip(values, new, strict=True)]
        )
        assert [done[0], done[2]] == [True, True]
        assert isinstance(done[1], TierFull), done[1]
        assert await fetch(replacing, list(values), [2_000] * 3) == [
            bytes(new[0]),
            values[make_key(1)],
            bytes(new[2]),
        ]

    async def test_a_replacement_lasts_as_long_as_what_was_there(self, replacing: Tier) -> None:
        if not replacing.traits.expires:
            pytest.skip("this tier removes nothing by itself")
        for number, ttl_s in enumerate((0.5, 1000, None)):
            await replacing.put([(make_key(number), [memoryview(b"old")])], ttl_s=ttl_s)
        values = {make_key(number): b"new" for number in range(3)}
        assert (await overwrite(replacing, values))[1:] == [True, True]
        # a tier does not report expiry
        while await replacing.probe([make_key(0)]) != [None]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await fetch(replacing, list(values), [3] * 3) == [None, b"new", b"new"]
