"""The generations of names in a tier that several hosts share."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import blake2b
from math import inf
from typing import Any

import pytest

from kvhold.core.errors import TierFull, TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.testing import TierContract
from kvhold.testing.tier import make_key
from kvhold.tiers.generations import GenerationTier, is_marker, marker_key
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.memcached import _expiry
from kvhold.tiers.memory import MemoryConfig, MemoryTier
from kvhold.tiers.redis import RedisTier
from kvhold.tiers.url import parse_url
from tests.cache.below import PATIENT_S
from tests.cache.clearing import AWAY, DOWN
from tests.cache.places import place
from tests.tiers.memory import Place, SharedMemoryTier

__all__ = ["place"]


class TestGenerations:
    @staticmethod
    def tiers(place: Place, count: int = 2) -> list[GenerationTier]:
        return [GenerationTier(SharedMemoryTier(place), lambda prefix: None) for _ in range(count)]

    async def test_a_write_in_progress_during_another_hosts_clear_is_not_found(
        self, place: Place
    ) -> None:
        one, other = self.tiers(place)
        key = make_key(1)
        await one.probe([key])
        write = one.putting([(key, [memoryview(b"old")])])
        await other.advance(key[:NAMESPACE_BYTES])
        assert await one.probe([key]) == [None]
        await write()
        assert (
            await one.probe([key])
            == await other.probe([key])
            == await self.tiers(place)[0].probe([key])
            == [None]
        )

    async def test_a_later_host_finds_the_latest_of_many_generations(self, place: Place) -> None:
        one, other = self.tiers(place)
        key = make_key(1)
        for _ in range(40):
            await one.advance(key[:NAMESPACE_BYTES])
        await one.put([(key, [memoryview(b"new")])])
        assert await other.probe([key]) == [3]
        assert [found async for found in other.scan(key[:NAMESPACE_BYTES])] == [key]

    async def test_a_scan_of_everything_gives_keys_of_namespaces_that_only_others_have_cleared(
        self, place: Place
    ) -> None:
        one, other = self.tiers(place)
        keys = [make_key(number, bytes([65 + number]) * NAMESPACE_BYTES) for number in range(3)]
        for key in keys[:2]:
            await one.advance(key[:NAMESPACE_BYTES])
        await one.put([(key, [memoryview(b"new")]) for key in keys])
        assert sorted([found async for found in other.scan(b"")]) == keys

    async def test_a_marker_that_was_evicted_is_put_again(self, place: Place) -> None:
        [one, other] = self.tiers(place)
        key = make_key(1)
        await one.put([(key, [memoryview(b"old")])])
        await one.advance(key[:NAMESPACE_BYTES])
        del place.values[marker_key(key[:NAMESPACE_BYTES], 1)]
        await one.refresh()
        assert await other.probe([key]) == [None]

    async def test_no_value_is_found_while_a_marker_has_no_answer(self, place: Place) -> None:
        key, space = make_key(1), make_key(1)[:NAMESPACE_BYTES]
        [one] = self.tiers(place, 1)
        await one.put([(key, [memoryview(b"old")])])
        await one.advance(space)
        for number in (1, 4):
            [later] = self.tiers(place, 1)
            place.unanswered = {marker_key(space, number)}
            for _ in range(2):
                with pytest.raises(TierUnavailable):
                    await later.probe([key])
            place.unanswered = set()
            assert await later.probe([key]) == [None]
        place.unanswered = {marker_key(space, 2)}
        with pytest.raises(TierUnavailable):
            await one.probe([key])

    async def test_a_fault_of_one_marker_does_not_keep_a_host_from_learning_others(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        first, second, third = (bytes([65 + n]) * NAMESPACE_BYTES for n in range(3))
        [other] = self.tiers(place, 1)
        one = GenerationTier(SharedMemoryTier(place), told.append)
        for space in (first, second, third):
            one.use(space)
        await one.advance(first)
        await one.refresh()
        await other.advance(second)
        place.unanswered = {marker_key(third, 1)}
        with pytest.raises(TierUnavailable):
            await one.refresh()
        assert told == [second]
        del place.values[marker_key(first, 1)]
        place.unanswered = set()
        await other.advance(third)

        class Full(SharedMemoryTier):
            async def put(self, items: Any, **options: Any) -> Any:
                return [TierFull("memory", "put", "no room")] * len(items)

        one._tier = Full(place)
        with pytest.raises(TierFull):
            await one.refresh()
        assert told == [second, third]

    async def test_a_host_that_starts_later_finds_the_generation_though_old_markers_expired(
        self, place: Place
    ) -> None:
        one, other = self.tiers(place)
        space = make_key(1)[:NAMESPACE_BYTES]
        for number in range(1, 40):
            await one.advance(space)
            for old in range(number):
                place.values.pop(marker_key(space, old), None)
            await one.refresh()
            if number % 8 == 7:
                [later] = self.tiers(place, 1)
                await later.meet([space])
                assert later.numbers == {space: number}
        await other.probe([make_key(1)])
        assert other.numbers == one.numbers == {space: 39}

    async def test_a_host_does_not_take_its_own_clear_for_another_ones(self, place: Place) -> None:
        told: list[bytes] = []
        key, stored, go_on = make_key(1), asyncio.Event(), asyncio.Event()

        class LateAnswer(SharedMemoryTier):
            async def put(self, *args: Any, **options: Any) -> Any:
                answer = await super().put(*args, **options)
                stored.set()
                await go_on.wait()
                return answer

        one = GenerationTier(LateAnswer(place), told.append)
        await one.probe([key])
        clear = asyncio.ensure_future(one.advance(key[:NAMESPACE_BYTES]))
        await stored.wait()
        await one.probe([key])
        go_on.set()
        await clear
        assert (told, one.numbers) == ([], {key[:NAMESPACE_BYTES]: 1})

    async def test_of_two_clears_at_once_each_host_learns_of_the_other_ones(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        space = make_key(1)[:NAMESPACE_BYTES]
        [other] = self.tiers(place, 1)

        class OtherIsFaster(SharedMemoryTier):
            async def put(self, *args: Any, **options: Any) -> Any:
                if not other.numbers:
                    await other.advance(space)
                return await super().put(*args, **options)

        one = GenerationTier(OtherIsFaster(place), told.append)
        await one.advance(space)
        assert (told, one.numbers) == ([space], {space: 2})
        await other.refresh()
        assert other.numbers == {space: 2}  # what it stored between the two clears goes

    async def test_no_name_of_a_generation_is_used_until_it_is_known_whose_clear_began_it(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        key, stored, go_on = make_key(1), asyncio.Event(), asyncio.Event()
        [other] = self.tiers(place, 1)

        class OtherIsFasterAndTheAnswerIsLate(SharedMemoryTier):
            async def put(self, *args: Any, **options: Any) -> Any:
                if not other.numbers:
                    await other.advance(key[:NAMESPACE_BYTES])
                answer = await super().put(*args, **options)
                stored.set()
                await go_on.wait()
                return answer

        one = GenerationTier(OtherIsFasterAndTheAnswerIsLate(place), told.append)
        clear = asyncio.ensure_future(one.advance(key[:NAMESPACE_BYTES]))
        await stored.wait()
        await one.probe([key])
        await one.refresh()
        # what memory holds may be older than the other clear
        assert (told, one.name_of(key)) == ([], key)
        go_on.set()
        await clear
        assert told == [key[:NAMESPACE_BYTES]]
        await other.refresh()
        assert one.name_of(key) == other.name_of(key) != key

    async def test_what_another_host_stores_after_a_clear_is_no_garbage(self, place: Place) -> None:
        one, other = self.tiers(place)
        old, new = make_key(1), make_key(2)
        await other.advance(old[:NAMESPACE_BYTES])
        await other.put([(old, [memoryview(b"old")])])
        assert await one.advance(b"") == b""
        await other.refresh()
        await other.put([(new, [memoryview(b"new")])])
        garbage = await one.names_of(b"")
        assert len(garbage) == 1
        await one.remove_names(*garbage.taken())
        assert await other.probe([old, new]) == [None, 3]

    async def test_a_clear_of_everything_leaves_the_values_that_others_stored_since(
        self, place: Place
    ) -> None:
        """In namespaces that the clearing host does not know, and after further clears."""
        one, other = self.tiers(place)
        old, new, newest = (make_key(n, bytes([65 + n]) * NAMESPACE_BYTES) for n in range(3))
        await one.put([(old, [memoryview(b"old")])])
        await other.advance(newest[:NAMESPACE_BYTES])
        await other.put([(newest, [memoryview(b"old")])])
        await one.advance(b"")
        await other.probe([new])
        await other.put([(new, [memoryview(b"new")])])
        garbage = [name for part in (await one.names_of(b"")).taken() for name in part]
        assert sorted(place.values[name] for name in garbage) == [b"old", b"old"]
        await other.advance(b"")  # which the first host has not learned of
        await other.put([(newest, [memoryview(b"newest")])])
        await one.remove_names(
            [name for part in (await one.names_of(b"")).taken() for name in part]
        )
        assert await other.probe([newest]) == [6]
        await other.remove_names(
            [name for part in (await other.names_of(b"")).taken() for name in part]
        )
        assert [value for name, value in place.values.items() if not is_marker(name)] == [b"newest"]

    async def test_removing_again_later_leaves_the_values_that_others_stored_since(
        self, place: Place
    ) -> None:
        def host() -> Guard:
            guard = Guard(
                SharedMemoryTier(place),
                GuardConfig(breaker_pause_s=0.01),
                name="tier",
                metrics=Metrics(),
            )
            guard.share(lambda prefix: None)
            return guard

        one, other = host(), host()
        old, new = (make_key(n, bytes([65 + n]) * NAMESPACE_BYTES) for n in range(2))
        await one.put([(old, [memoryview(b"old")])])
        place.faults["scan"] = AWAY
        await one.clear(b"")
        await other.probe([new])
        await other.put([(new, [memoryview(b"new")])])
        place.faults.clear()
        async with asyncio.timeout(PATIENT_S):
            while b"old" in place.values.values():  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
        assert await other.probe([new]) == [3]
        await one.close()
        await other.close()

    async def test_names_follow_the_documented_format(self, place: Place) -> None:
        """docs/format.md"""
        [one] = self.tiers(place, 1)
        key = make_key(1)
        space = key[:NAMESPACE_BYTES]
        for prefix in (b"", b"", space):
            await one.advance(prefix)
        counts = (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
        digest = blake2b(space + counts, digest_size=12, person=b"kvhold-gen").digest()
        assert one.name_of(key) == digest + bytes([2, 0, 0, 0]) + key[NAMESPACE_BYTES:]

    async def test_a_marker_never_expires_by_itself(self, place: Place) -> None:
        [one] = self.tiers(place, 1)
        await one.advance(b"")
        assert list(place.ttls.values()) == [inf]
        redis = RedisTier.from_url(parse_url("redis://127.0.0.1:1/0?ttl_s=86400"))
        assert (redis._ttl_ms(None), redis._ttl_ms(inf)) == (86_400_000, None)
        assert (_expiry(60), _expiry(inf)) == (60, 0)

    async def test_a_clear_of_everything_is_learned_by_a_host_of_very_many_namespaces(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        one = self.tiers(place, 1)[0]
        other = GenerationTier(SharedMemoryTier(place), told.append, holds=lambda space: True)
        for number in range(4200):
            other.use(number.to_bytes(NAMESPACE_BYTES, "big"))
        await other.refresh()
        await one.advance(b"")
        await other.refresh()
        assert told == [b""]
        await one.advance((7).to_bytes(NAMESPACE_BYTES, "big"))
        for _ in range(2):  # each has its turn
            await other.refresh()
        assert told == [b"", (7).to_bytes(NAMESPACE_BYTES, "big")]

    async def test_a_search_of_many_namespaces_asks_for_a_few_at_once_and_goes_on_after_a_fault(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        spaces = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(1, 401)]
        [other] = self.tiers(place, 1)
        one = GenerationTier(SharedMemoryTier(place), told.append)
        for space in spaces:
            one.use(space)
        for slow in (spaces[0], spaces[200]):
            place.unanswered = {marker_key(slow, 1)}
            with pytest.raises(TierUnavailable):
                await one.refresh()
        assert sum(one.has_met([space]) for space in spaces) >= 128, "met before the faults"
        place.unanswered = set()
        await one.refresh()
        assert one.has_met(spaces)
        assert max(map(len, place.asked["probe"])) < 100 * 16
        for space in (spaces[0], spaces[-1]):
            await other.advance(space)
        await one.refresh()
        assert sorted(told) == [spaces[0], spaces[-1]]

    async def test_a_slow_search_is_no_fault_of_the_tier(self, place: Place) -> None:
        class Slow(SharedMemoryTier):
            async def probe(self, keys: Any) -> Any:
                await asyncio.sleep(0.03)
                return await super().probe(keys)

        told: list[bytes] = []
        guard = Guard(
            Slow(place), GuardConfig(probe_timeout_s=0.01), name="tier", metrics=Metrics()
        )
        guard.share(told.append)
        [other] = self.tiers(place, 1)
        spaces = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(1, 201)]
        for space in spaces:
            guard.use(space)
        await guard.refresh()
        await other.advance(spaces[150])
        await guard.refresh()
        assert told == [spaces[150]]
        place.faults = dict(DOWN)
        for _ in range(10):
            await guard.refresh()
        assert guard.available, "only what requests wait for counts"

    async def test_a_frame_read_before_a_clear_replaces_no_value_stored_after_it(
        self, place: Place
    ) -> None:
        guard = Guard(SharedMemoryTier(place), GuardConfig(), name="tier", metrics=Metrics())
        guard.share(lambda prefix: None)
        key = make_key(1)
        await guard.put([(key, [memoryview(b"old")])])
        names = guard.names([key])
        await guard.clear(key[:NAMESPACE_BYTES])
        await guard.put([(key, [memoryview(b"new")])])
        assert (
            await guard.replace([(key, [memoryview(b"old, reencoded")])], names=names)
        ).items == [False]
        assert b"old, reencoded" not in place.values.values()

    async def test_the_owner_of_memory_is_told_before_a_key_has_a_new_name(
        self, place: Place
    ) -> None:
        told: list[bytes] = []
        key = make_key(1)
        one = GenerationTier(SharedMemoryTier(place), lambda prefix: told.append(one.name_of(key)))
        await one.probe([key])
        await self.tiers(place)[0].advance(key[:NAMESPACE_BYTES])
        await one.probe([key])
        assert told == [key]
        assert one.name_of(key) != key


class TestTierOfALaterGeneration(TierContract):
    too_large_bytes = (32 << 20) + 1

    @pytest.fixture
    async def tier(self) -> AsyncIterator[GenerationTier]:
        tier = GenerationTier(MemoryTier(MemoryConfig(max_bytes=32 << 20)), lambda prefix: None)
        await tier.advance(b"")
        for number in range(3):
            await tier.advance(make_key(number)[:NAMESPACE_BYTES])
        yield tier
        await tier.close()
