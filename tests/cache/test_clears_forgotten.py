"""Clears of namespaces that the cache does not know any more."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.testing.cache import a_prompt, read, store
from kvhold.testing.tier import make_key
from kvhold.tiers.generations import ALL, GenerationTier, _leading, marker_key
from tests.cache.below import HYBRID_SPACE, SPACE, cache_over, eventually, forget, on_disk
from tests.cache.clearing import NAMESPACE, PLUGINS, PROMPT, settle
from tests.cache.places import place
from tests.tiers.memory import Place, SharedMemoryTier

__all__ = ["place"]


class TestForgottenNamespaces:
    """Requests make namespaces without limit (a salt, a tag), so a host forgets some."""

    @pytest.fixture
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One namespace is in use at once."""
        monkeypatch.setattr("kvhold.tiers.generations._MOST_USED", 1)
        monkeypatch.setattr("kvhold.tiers.generations._MOST_NUMBERS", 1)

    @staticmethod
    async def use_others(tier: GenerationTier, place: Place, numbers: range = range(20)) -> None:
        """Use namespaces that another host has cleared."""
        for number in numbers:
            space = (1 << 64 | number).to_bytes(NAMESPACE_BYTES, "big")
            place.values.setdefault(marker_key(space, 1), b"another host's")
            await tier.probe([make_key(0, space)])

    async def test_a_host_refreshes_a_bounded_number_of_namespaces(self, place: Place) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda prefix: None)
        spaces = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(1, 20_000)]
        for space in spaces:
            one.use(space)
        for _ in range(3):
            place.asked.clear()
            await one.refresh()
        asked = {key[:NAMESPACE_BYTES] for keys in place.asked["probe"] for key in keys}
        assert asked == {ALL, *spaces[-64 * 64 :]}
        assert one.has_met(spaces[-100:]) and not one.has_met(spaces[:1])

    async def test_namespaces_of_memory_and_those_used_lately_are_not_forgotten(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.generations._MOST_USED", 10)
        told: list[bytes] = []
        held, lately, other = (bytes([65 + n]) * NAMESPACE_BYTES for n in range(3))
        in_memory = {held}
        one = GenerationTier(
            SharedMemoryTier(place), told.append, holds=lambda space: space in in_memory
        )
        for space in (held, other):
            await one.probe([make_key(0, space)])
        for number in range(0, 20, 4):
            await one.probe([make_key(0, lately)])
            await self.use_others(one, place, range(number, number + 4))
            assert one.has_met([held]) and one.has_met([lately])
        assert not one.has_met([other])
        await GenerationTier(SharedMemoryTier(place), told.append).advance(held)
        told.clear()
        await one.refresh()
        assert told == [held]
        in_memory.clear()
        await one.refresh()
        await self.use_others(one, place)
        assert not one.has_met([held])

    @pytest.mark.usefixtures("few")
    async def test_old_values_of_a_forgotten_namespace_are_not_found(self, place: Place) -> None:
        """Those from before its own clear, and from before another host's."""
        one, other = (GenerationTier(SharedMemoryTier(place), lambda space: None) for _ in "12")
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        for number in range(1, 4):
            await one.put([(key, [memoryview(bytes(number))])])
            assert await one.probe([key]) == [number]
            await (one if number % 2 else other).advance(key[:NAMESPACE_BYTES])
            await self.use_others(one, place)
            assert not one.has_met([key[:NAMESPACE_BYTES]])
            assert key[:NAMESPACE_BYTES] not in one.numbers
            if number == 1:  # probed, and then forgotten: read by an old name it would be found
                assert await one.get([key], [[memoryview(bytearray(9))]]) == [None]
            assert await one.probe([key]) == [None]
        assert len(place.values) > 3, "the old values are still there"

    @pytest.mark.usefixtures("few")
    async def test_a_value_put_under_the_name_of_a_forgotten_generation_is_not_found(
        self, place: Place
    ) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None)
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        await one.advance(key[:NAMESPACE_BYTES])
        await self.use_others(one, place)
        await one.put([(key, [memoryview(b"late")])])
        assert await one.get([key], [[memoryview(bytearray(9))]]) == [None]
        assert await one.probe([key]) == [None]

    @pytest.mark.usefixtures("few")
    async def test_a_search_that_began_before_a_namespace_was_forgotten_does_not_meet_it(
        self, place: Place
    ) -> None:
        asked, answer = asyncio.Event(), asyncio.Event()
        answer.set()

        class Slow(SharedMemoryTier):
            async def probe(self, keys: Any) -> Any:
                sizes = await super().probe(keys)
                if any(key.startswith(b"s" * NAMESPACE_BYTES) for key in keys):
                    asked.set()
                    await answer.wait()
                return sizes

        one = GenerationTier(Slow(place), lambda space: None)
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        await one.put([(key, [memoryview(b"old")])])
        asked.clear()
        answer.clear()
        meeting = asyncio.ensure_future(one.meet([key[:NAMESPACE_BYTES]]))
        await asked.wait()
        await self.use_others(one, place)
        place.values[marker_key(key[:NAMESPACE_BYTES], 1)] = b"another host's"
        one.use(key[:NAMESPACE_BYTES])
        answer.set()
        await meeting
        assert await one.get([key], [[memoryview(bytearray(9))]]) == [None]

    @pytest.mark.usefixtures("few")
    async def test_a_clear_of_a_forgotten_namespace_begins_the_generation_after_the_latest(
        self, place: Place
    ) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None)
        space = b"s" * NAMESPACE_BYTES
        for number in range(1, 20):
            await one.advance(space)
            assert one.numbers[space] == number
            await self.use_others(one, place)
            assert space not in one.numbers
            for old in range(1, number):
                if number >= 8 and old != 8:  # expired; a search finds the latest without them
                    place.values.pop(marker_key(space, old), None)
            place.values.update((marker_key(space, one), b"restored") for one in _leading(number))

    @pytest.mark.usefixtures("few")
    async def test_a_namespace_that_is_forgotten_as_its_clear_begins_is_searched_again(
        self, place: Place
    ) -> None:
        space = b"s" * NAMESPACE_BYTES

        class Slow(SharedMemoryTier):
            async def probe(self, keys: Any) -> Any:
                sizes = await super().probe(keys)
                if any(key.startswith(space) for key in keys) and not others:
                    others.append(True)
                    await TestForgottenNamespaces.use_others(one, place)
                return sizes

        others: list[bool] = []
        one = GenerationTier(Slow(place), lambda space: None, numbers={space: 9})
        place.values.update((marker_key(space, number), b"restored") for number in (8, 9))
        await one.advance(space)
        assert others and one.numbers[space] == 10

    @pytest.mark.usefixtures("few")
    async def test_no_number_of_a_namespace_in_use_is_forgotten(self, place: Place) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None, holds=lambda space: True)
        keys = [make_key(1, bytes([65 + number]) * NAMESPACE_BYTES) for number in range(9)]
        for key in keys:
            await one.advance(key[:NAMESPACE_BYTES])
            await one.put([(key, [memoryview(b"new")])])
        assert len(one.numbers) == 9
        buffers = [[memoryview(bytearray(3))] for _ in keys]
        assert await one.get(keys, buffers) == [3] * 9

    @pytest.mark.usefixtures("few")
    async def test_a_scan_finds_the_keys_of_forgotten_namespaces(self, place: Place) -> None:
        one = GenerationTier(SharedMemoryTier(place), lambda space: None)
        key = make_key(1, b"s" * NAMESPACE_BYTES)
        await one.advance(key[:NAMESPACE_BYTES])
        await one.put([(key, [memoryview(b"new")])])
        await self.use_others(one, place)
        assert [found async for found in one.scan(key[:NAMESPACE_BYTES])] == [key]

    @pytest.mark.usefixtures("few")
    def test_chunks_in_memory_are_not_used_after_the_clear_of_another_host(
        self, place: Place
    ) -> None:
        """They were stored, and neither probed nor written."""
        url = place.shared_url(clears_check_s=0.01)
        prompts = [PROMPT, a_prompt(HYBRID_SPACE, 64)]
        with (
            cache_over(url, plugins=PLUGINS) as one,
            cache_over(url, plugins=PLUGINS, write_behind_bytes=1) as other,
        ):
            for prompt in prompts:
                store(other, prompt)
            assert [read(other, prompt) for prompt in prompts] == [64, 64]
            one.clear(NAMESPACE)
            eventually(lambda: read(other, PROMPT) == 0)
            assert read(other, prompts[1]) == 64
            assert other.tier_worker is not None
            assert not other.tier_worker._new_spaces, "taken by each check"

    def test_new_namespaces_of_memory_do_not_wait_for_the_next_check(self, place: Place) -> None:
        with cache_over(place.shared_url(clears_check_s=1000), plugins=PLUGINS) as cache:
            store(cache, PROMPT)
            settle(cache)
            assert cache.tier_worker is not None
            assert not cache.tier_worker._new_spaces
            [guard] = cache.tier_worker._shared
            assert isinstance(guard.tier, GenerationTier) and guard.tier.has_met([NAMESPACE])

    @pytest.mark.usefixtures("few")
    def test_chunks_on_a_disk_are_not_used_after_the_clear_of_another_host(
        self, place: Place, tmp_path: Path
    ) -> None:
        url = place.shared_url(clears_check_s=1000)
        with (
            cache_over(url, plugins=PLUGINS) as one,
            cache_over(
                on_disk(tmp_path), url, plugins=PLUGINS, clears_file=str(tmp_path / "clears")
            ) as other,
        ):
            for number in range(3):
                store(other, PROMPT)
                settle(other)
                forget(other)
                assert read(other, PROMPT) == 64
                forget(other)
                for shift in range(5):
                    read(other, a_prompt(replace(SPACE, cache_salt=f"{number}{shift}"), 64))
                one.clear(NAMESPACE)
                assert read(other, PROMPT) == 0
                settle(other)
                assert read(other, PROMPT) == 0
