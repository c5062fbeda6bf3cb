"""The contract of tiers as one test suite.

    class TestMyTier(TierContract):
        @pytest.fixture
        async def tier(self):
            tier = MyTier(...)
            yield tier
            await tier.close()

Each test starts with an empty tier with room for 16 MiB.
"""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from kvhold.core.errors import TierError, TierFull, TierIncomplete
from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.core.turns import next_turn
from kvhold.testing.tier import (
    UNTOUCHED,
    fetch,
    make_key,
    make_value,
    partly_scanned,
    scanned,
    store,
)
from kvhold.testing.tier_replaces import TierReplaces
from kvhold.tiers.base import Tier

SIZES = (
    1,
    2,
    3,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    65_535,
    65_536,
    131_071,
    131_073,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    3_000_001,
)

# special in shells, URLs, patterns or protocols, but only bytes in keys
AWKWARD = (
    b"\x00",
    b"\xff",
    b"*",
    b"?",
    b"[a",
    b"..",
    b"/",
    b"\\",
    b"%",
    b"%2F",
    b"\r\n",
    b" ",
    b"'",
    b'"',
    b"{}",
    b"$1",
    b":",
    b"@",
    b".tmp",
)


class TierContract(TierReplaces):
    """Override the fixture `tier`."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def tier(self) -> Any:
        raise NotImplementedError("override the fixture `tier`")

    async def lose_a_part(self, tier: Any) -> None:
        """Make one disk or server of several fail, which has some of 64 values.

        Override this for a tier that works without a part.
        """
        pytest.skip("this tier does not work without a part of its place")

    async def test_it_has_a_name(self, tier: Tier) -> None:
        assert tier.traits.name

    async def test_an_empty_tier_misses(self, tier: Tier) -> None:
        keys = [make_key(1), make_key(2)]
        assert await tier.probe(keys) == [None, None]
        assert await fetch(tier, keys, [8, 8]) == [None, None]
        assert await tier.delete(keys) == [False, False]
        assert await scanned(tier) == []

    async def test_no_keys_give_no_answers(self, tier: Tier) -> None:
        assert await tier.probe([]) == []
        assert await tier.get([], []) == []
        assert await tier.put([]) == []
        assert await tier.delete([]) == []

    @pytest.mark.parametrize("nbytes", SIZES)
    async def test_a_value_of_any_size_comes_back(self, tier: Tier, nbytes: int) -> None:
        key, value = make_key(1), make_value(1, nbytes)
        assert await store(tier, {key: value}) == [True]
        assert await tier.probe([key]) == [nbytes]
        assert await fetch(tier, [key], [nbytes]) == [value]

    async def test_values_of_all_sizes_travel_in_one_call(self, tier: Tier) -> None:
        values = {make_key(n): make_value(n, n) for n in SIZES}
        assert await store(tier, values) == [True] * len(values)
        assert await tier.probe(list(values)) == list(SIZES)
        assert await fetch(tier, list(values), SIZES) == list(values.values())

    async def test_many_small_values_travel_in_one_call(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 1 + i % 7) for i in range(1000)}
        assert await store(tier, values) == [True] * 1000
        assert await fetch(tier, list(values), [7] * 1000) == list(values.values())
        assert await scanned(tier) == sorted(values)
        assert await tier.delete(list(values)) == [True] * 1000

    async def test_bytes_mean_nothing(self, tier: Tier) -> None:
        values = {make_key(i): bytes([i]) * 5 for i in range(256)} | {
            make_key(256): b"\r\n$5\r\nhello\r\n",
            make_key(257): bytes(4096),
        }
        await store(tier, values)
        assert await fetch(tier, list(values), [4096] * len(values)) == list(values.values())

    async def test_a_value_may_be_a_part_of_read_only_memory(self, tier: Tier) -> None:
        whole = make_value(1, 10_000)
        assert await tier.put([(make_key(1), [memoryview(whole)[3:9_000]])]) == [None]
        assert await fetch(tier, [make_key(1)], [8_997]) == [whole[3:9_000]]

    async def test_what_was_put_no_longer_depends_on_the_callers_memory(self, tier: Tier) -> None:
        value = make_value(1, 5_000)
        mine = bytearray(value)
        await tier.put([(make_key(1), [memoryview(mine)])])
        mine[:] = bytes(5_000)
        assert await fetch(tier, [make_key(1)], [5_000]) == [value]

    async def test_what_was_got_is_the_callers_own(self, tier: Tier) -> None:
        key, value = make_key(1), make_value(1, 5_000)
        await store(tier, {key: value})
        mine = bytearray(5_000)
        await tier.get([key], [[memoryview(mine)]])
        mine[:] = bytes(5_000)
        assert await fetch(tier, [key], [5_000]) == [value]

    async def test_a_key_keeps_its_first_value(self, tier: Tier) -> None:
        key, first = make_key(1), make_value(1, 1_000)
        assert await store(tier, {key: first}) == [True]
        for nbytes in (1_000, 10, 2_000):
            assert await store(tier, {key: make_value(2, nbytes)}) == [True]
            assert await tier.probe([key]) == [1_000]
            assert await fetch(tier, [key], [2_000]) == [first]

    async def test_a_key_twice_in_one_call_keeps_its_first_value(self, tier: Tier) -> None:
        key, first = make_key(1), make_value(1, 100)
        assert await tier.put(
            [(key, [memoryview(first)]), (key, [memoryview(make_value(2, 200))])]
        ) == [None, None]
        assert await fetch(tier, [key], [200]) == [first]

    async def test_each_answer_belongs_to_its_key(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 100 + i) for i in range(10)}
        await store(tier, {key: value for i, (key, value) in enumerate(values.items()) if i % 3})
        there = [i % 3 > 0 for i in range(10)]
        assert await tier.probe(list(values)) == [100 + i if there[i] else None for i in range(10)]
        assert await fetch(tier, list(values), [200] * 10) == [
            v if there[i] else None for i, v in enumerate(values.values())
        ]
        assert await tier.delete(list(values)) == there

    async def test_the_order_of_the_keys_is_the_order_of_the_answers(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 50 + i) for i in range(20)}
        await store(tier, values)
        keys = list(reversed(values)) + list(values)
        assert await tier.probe(keys) == [len(values[key]) for key in keys]
        assert await fetch(tier, keys, [100] * 40) == [values[key] for key in keys]

    async def test_a_miss_leaves_its_buffer_alone(self, tier: Tier) -> None:
        await store(tier, {make_key(1): make_value(1, 64)})
        buffers = [bytearray([UNTOUCHED]) * 64 for _ in range(3)]
        await tier.get([make_key(0), make_key(1), make_key(2)], [[memoryview(b)] for b in buffers])
        assert buffers[0] == buffers[2] == bytearray([UNTOUCHED]) * 64

    @pytest.mark.parametrize("nbytes", [1, 4096, 100_001])
    async def test_a_larger_buffer_is_written_at_its_start_alone(
        self, tier: Tier, nbytes: int
    ) -> None:
        value = make_value(1, nbytes)
        await store(tier, {make_key(1): value})
        buffer = bytearray([UNTOUCHED]) * (nbytes + 5_000)
        assert await tier.get([make_key(1)], [[memoryview(buffer)]]) == [nbytes]
        assert bytes(buffer[:nbytes]) == value
        assert buffer[nbytes:] == bytearray([UNTOUCHED]) * 5_000

    async def test_a_buffer_may_be_a_part_of_other_memory(self, tier: Tier) -> None:
        value = make_value(1, 1_000)
        await store(tier, {make_key(1): value})
        memory = bytearray([UNTOUCHED]) * 3_000
        assert await tier.get([make_key(1)], [[memoryview(memory)[777:1_777]]]) == [1_000]
        assert memory == bytearray([UNTOUCHED]) * 777 + value + bytearray([UNTOUCHED]) * 1_223

    async def test_a_buffer_that_is_too_small_loses_its_own_item_alone(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 1_000) for i in range(3)}
        await store(tier, values)
        assert await fetch(tier, list(values), [1_000, 999, 1_000]) == [
            values[make_key(0)],
            None,
            values[make_key(2)],
        ]

    async def test_a_value_may_come_in_parts(self, tier: Tier) -> None:
        value = make_value(1, 20_000)
        cuts = [0, 1, 1, 4_096, 4_097, 12_000, 20_000]
        parts = [memoryview(bytearray(value[a:b])) for a, b in pairwise(cuts)]
        assert await tier.put([(make_key(1), parts)]) == [None]
        assert await tier.probe([make_key(1)]) == [20_000]
        assert await fetch(tier, [make_key(1)], [20_000]) == [value]

    @pytest.mark.parametrize(
        "cuts",
        [
            [0, 20_000],
            [0, 4_096, 20_000],
            [0, 1, 1, 4_097, 12_000, 20_000],
            [0, 64, 19_999, 20_000, 30_000],
        ],
    )
    async def test_a_value_may_go_into_parts(self, tier: Tier, cuts: list[int]) -> None:
        value = make_value(1, 20_000)
        await store(tier, {make_key(1): value})
        buffers = [bytearray([UNTOUCHED]) * (b - a) for a, b in pairwise(cuts)]
        assert await tier.get([make_key(1)], [[memoryview(b) for b in buffers]]) == [20_000]
        assert b"".join(buffers) == value + bytes([UNTOUCHED]) * (cuts[-1] - 20_000)

    async def test_parts_may_be_of_any_format(self, tier: Tier) -> None:
        value = make_value(1, 1_024)
        await tier.put(
            [(make_key(1), [memoryview(bytearray(value)).cast("Q"), memoryview(b"end")])]
        )
        whole, end = memoryview(bytearray(1_024)).cast("B", (8, 128)), memoryview(bytearray(3))
        assert await tier.get([make_key(1)], [[whole, end]]) == [1_027]
        assert (whole.tobytes(), end.tobytes()) == (value, b"end")

    @pytest.mark.parametrize("nbytes", [10_000, 3_000_000])
    async def test_a_range_is_read_alone(self, tier: Tier, nbytes: int) -> None:
        value = make_value(1, nbytes)
        await store(tier, {make_key(1): value})
        spans = [
            (0, 1),
            (0, nbytes),
            (1, 4_095),
            (4_096, 4_096),
            (4_097, 100),
            (nbytes - 1, 1),
            (nbytes // 2, nbytes // 2),
        ]
        buffers = [bytearray(length) for _, length in spans]
        got = await tier.get(
            [make_key(1)] * len(spans),
            [[memoryview(b)] for b in buffers],
            starts=[start for start, _ in spans],
        )
        assert got == [length for _, length in spans]
        assert buffers == [value[start : start + length] for start, length in spans]

    async def test_a_range_goes_into_parts(self, tier: Tier) -> None:
        value = make_value(1, 10_000)
        await store(tier, {make_key(1): value})
        buffers = [bytearray(100), bytearray(5_000), bytearray(7)]
        assert await tier.get(
            [make_key(1)], [[memoryview(b) for b in buffers]], starts=[3_000]
        ) == [5_107]
        assert b"".join(buffers) == value[3_000:8_107]

    async def test_a_range_beyond_the_value_is_a_miss(self, tier: Tier) -> None:
        await store(tier, {make_key(1): make_value(1, 10_000)})
        keys, starts, lengths = (
            [make_key(1)] * 4 + [make_key(2)],
            [9_999, 10_000, 20_000, 0, 0],
            [2, 1, 1, 10_001, 1],
        )
        assert (
            await tier.get(keys, [[memoryview(bytearray(n))] for n in lengths], starts=starts)
            == [None] * 5
        )

    async def test_a_check_of_a_tier_that_works_passes(self, tier: Tier) -> None:
        await tier.check()
        await store(tier, {make_key(1): b"x"})
        await tier.check()
        assert await scanned(tier) == [make_key(1)]

    async def test_a_cancelled_get_writes_nothing_any_more(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 500_000) for i in range(4)}
        await store(tier, values)
        for turns in range(8):
            buffers = [bytearray(500_000) for _ in values]
            call = asyncio.ensure_future(tier.get(list(values), [[memoryview(b)] for b in buffers]))
            for _ in range(turns):
                await next_turn()
            call.cancel()
            await asyncio.wait((call,))
            seen = [bytes(b) for b in buffers]
            assert await fetch(tier, list(values), [500_000] * 4) == list(values.values())
            assert [bytes(b) for b in buffers] == seen

    async def test_a_cancelled_put_is_whole_or_not_there(self, tier: Tier) -> None:
        for turns in range(8):
            value = make_value(turns, 500_000)
            mine = bytearray(value)
            call = asyncio.ensure_future(tier.put([(make_key(turns), [memoryview(mine)])]))
            for _ in range(turns):
                await next_turn()
            call.cancel()
            await asyncio.wait((call,))
            mine[:] = bytes(500_000)
            assert await fetch(tier, [make_key(turns)], [500_000]) in ([value], [None])

    async def test_what_has_outlived_its_time_is_gone(self, tier: Tier) -> None:
        if not tier.traits.expires:
            pytest.skip("this tier removes nothing by itself")
        assert await tier.put([(make_key(1), [memoryview(b"short")])], ttl_s=0.05) == [None]
        assert await tier.put([(make_key(2), [memoryview(b"long")])], ttl_s=1000) == [None]
        assert await tier.put([(make_key(3), [memoryview(b"for ever")])]) == [None]
        # a tier does not report expiry
        while await tier.probe([make_key(1)]) != [None]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await fetch(tier, [make_key(1), make_key(2), make_key(3)], [10] * 3) == [
            None,
            b"long",
            b"for ever",
        ]

    async def test_unequal_lists_are_an_error_before_anything_is_read(self, tier: Tier) -> None:
        await store(tier, {make_key(1): make_value(1, 64)})
        buffers = [bytearray([UNTOUCHED]) * 64 for _ in range(2)]
        with pytest.raises(ValueError, match=r"1.*2"):
            await tier.get([make_key(1)], [[memoryview(b)] for b in buffers])
        with pytest.raises(ValueError, match=r"2.*1"):
            await tier.get([make_key(1), make_key(2)], [[memoryview(buffers[0])]])
        with pytest.raises(ValueError, match=r"1.*2"):
            await tier.get([make_key(1)], [[memoryview(buffers[0])]], starts=[0, 1])
        assert buffers == [bytearray([UNTOUCHED]) * 64] * 2

    async def test_a_value_without_room_loses_itself_alone(self, tier: Tier) -> None:
        if self.too_large_bytes is None:
            pytest.skip("this tier takes a value of any size")
        values = {make_key(i): make_value(i, 1_000) for i in range(2)}
        items = [(key, [memoryview(value)]) for key, value in values.items()]
        items.insert(1, (make_key(9), [memoryview(bytes(self.too_large_bytes))]))
        faults = await tier.put(items)
        assert [faults[0], faults[2]] == [None, None]
        assert isinstance(faults[1], TierFull), faults[1]
        assert await tier.probe([make_key(9)]) == [None]
        assert await fetch(tier, list(values), [1_000, 1_000]) == list(values.values())

    async def test_probing_changes_nothing(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 100) for i in range(3)}
        await store(tier, values)
        for _ in range(3):
            assert await tier.probe([*values, make_key(9)]) == [100, 100, 100, None]
        assert await scanned(tier) == sorted(values)

    async def test_a_deleted_key_is_gone(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 100) for i in range(3)}
        await store(tier, values)
        assert await tier.delete([make_key(1)]) == [True]
        assert await tier.probe(list(values)) == [100, None, 100]
        assert await fetch(tier, [make_key(1)], [100]) == [None]
        assert await scanned(tier) == sorted([make_key(0), make_key(2)])
        assert await tier.delete([make_key(1)]) == [False]

    async def test_a_key_twice_in_one_delete_is_removed_once(self, tier: Tier) -> None:
        await store(tier, {make_key(1): make_value(1, 100)})
        assert await tier.delete([make_key(1), make_key(1)]) == [True, False]

    async def test_a_deleted_key_may_come_back_with_another_value(self, tier: Tier) -> None:
        key = make_key(1)
        for generation, nbytes in enumerate((100, 5_000, 7)):
            value = make_value(generation, nbytes)
            assert await store(tier, {key: value}) == [True]
            assert await fetch(tier, [key], [nbytes]) == [value]
            assert await tier.delete([key]) == [True]

    async def test_keys_that_differ_in_one_byte_are_different(self, tier: Tier) -> None:
        base = bytes(range(KEY_BYTES))
        keys = [base] + [
            base[:i] + bytes([base[i] ^ 0x80]) + base[i + 1 :] for i in range(KEY_BYTES)
        ]
        values = {key: make_value(i, 10) for i, key in enumerate(keys)}
        await store(tier, values)
        assert await fetch(tier, keys, [10] * len(keys)) == list(values.values())

    async def test_any_byte_may_be_in_a_key(self, tier: Tier) -> None:
        keys = [(part * KEY_BYTES)[:KEY_BYTES] for part in AWKWARD] + [
            part + bytes(KEY_BYTES - len(part)) for part in AWKWARD[1:]
        ]
        keys += [bytes(KEY_BYTES - len(part)) + part for part in AWKWARD[1:]]
        values = {key: make_value(i, 20 + i) for i, key in enumerate(keys)}
        assert await store(tier, values) == [True] * len(values)
        assert await fetch(tier, list(values), [200] * len(values)) == list(values.values())
        assert await scanned(tier) == sorted(values)
        for key in values:
            assert await scanned(tier, key) == [key]
        assert await tier.delete(list(values)) == [True] * len(values)
        assert await scanned(tier) == []

    async def test_a_scan_finds_the_keys_that_begin_with_its_prefix(self, tier: Tier) -> None:
        spaces = [
            b"A" * NAMESPACE_BYTES,
            b"A" * (NAMESPACE_BYTES - 1) + b"B",
            b"*" * NAMESPACE_BYTES,
        ]
        keys = {space: [make_key(i, space) for i in range(5)] for space in spaces}
        await store(tier, {key: b"x" for group in keys.values() for key in group})
        for space, group in keys.items():
            assert await scanned(tier, space) == sorted(group)
        assert await scanned(tier, b"A" * (NAMESPACE_BYTES - 1)) == sorted(
            keys[spaces[0]] + keys[spaces[1]]
        )
        assert await scanned(tier, keys[spaces[0]][2]) == [keys[spaces[0]][2]]
        assert await scanned(tier, b"Z") == []
        assert await scanned(tier, b"\xff" * NAMESPACE_BYTES) == []
        assert await scanned(tier, b"") == sorted(key for group in keys.values() for key in group)

    async def test_what_a_scan_yields_may_be_deleted_meanwhile(self, tier: Tier) -> None:
        keys = [make_key(i) for i in range(50)]
        await store(tier, dict.fromkeys(keys, b"x"))
        seen = []
        async for key in tier.scan(b""):
            seen.append(key)
            assert await tier.delete([key]) == [True]
        assert sorted(seen) == sorted(keys)
        assert await scanned(tier) == []

    async def test_a_scan_may_be_left_early(self, tier: Tier) -> None:
        await store(tier, {make_key(i): b"x" for i in range(50)})
        scan = tier.scan(b"")
        await anext(scan)
        if (aclose := getattr(scan, "aclose", None)) is not None:
            await aclose()
        assert len(await scanned(tier)) == 50

    async def test_a_probe_without_a_part_of_the_place_tells_a_fault_from_a_miss(
        self, tier: Tier
    ) -> None:
        keys = [make_key(i) for i in range(64)]
        await store(tier, dict.fromkeys(keys, b"x"))
        await self.lose_a_part(tier)
        sizes = await tier.probe(keys)
        assert {1, TierError} == {
            TierError if isinstance(size, TierError) else size for size in sizes
        }

    async def test_a_scan_without_a_part_of_the_place_says_so(self, tier: Tier) -> None:
        keys = [make_key(i) for i in range(64)]
        await store(tier, dict.fromkeys(keys, b"x"))
        await self.lose_a_part(tier)
        assert set() < set(await partly_scanned(tier)) < set(keys)

    async def test_a_delete_without_a_part_of_the_place_says_so(self, tier: Tier) -> None:
        keys = [make_key(i) for i in range(64)]
        await store(tier, dict.fromkeys(keys, b"x"))
        await self.lose_a_part(tier)
        with pytest.raises(TierIncomplete):
            await tier.delete(keys)
        assert await partly_scanned(tier) == []
        for key in keys:
            try:
                assert await tier.delete([key]) == [False], "removed before the fault was raised"
            except TierIncomplete:
                continue

    async def test_calls_may_overlap(self, tier: Tier) -> None:
        values = {make_key(i): make_value(i, 1 + 997 * i) for i in range(64)}

        async def there_and_back(key: bytes, value: bytes) -> bool:
            stored = await store(tier, {key: value})
            found = await tier.probe([key])
            got = await fetch(tier, [key], [len(value)])
            removed = await tier.delete([key])
            return (stored, found, got, removed) == ([True], [len(value)], [value], [True])

        assert all(
            await asyncio.gather(*(there_and_back(key, value) for key, value in values.items()))
        )
        assert await scanned(tier) == []

    async def test_of_overlapping_puts_of_one_key_one_wins_whole(self, tier: Tier) -> None:
        key, values = make_key(1), [make_value(i, 50_000 + i) for i in range(8)]
        await asyncio.gather(*(store(tier, {key: value}) for value in values))
        assert (await fetch(tier, [key], [60_000]))[0] in values
        assert await scanned(tier) == [key]

    async def test_a_get_beside_put_and_delete_is_whole_or_a_miss(self, tier: Tier) -> None:
        key, value = make_key(1), make_value(1, 200_000)

        async def turn() -> None:
            await store(tier, {key: value})
            await tier.delete([key])

        reads = [fetch(tier, [key], [len(value)]) for _ in range(16)]
        answers = await asyncio.gather(*(turn() for _ in range(8)), *reads)
        assert all(got in ([value], [None]) for got in answers[8:])

    async def test_closing_twice_is_harmless(self, tier: Tier) -> None:
        await store(tier, {make_key(1): b"x"})
        await tier.close()
        await tier.close()

    async def test_a_tier_may_be_closed_unused(self, tier: Tier) -> None:
        await tier.close()
