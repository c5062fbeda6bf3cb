"""Through a cache and a real tier below it: what comes back is exact, or it is a miss, whatever
happens to it down there.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvhold.cache import LocalCache
from kvhold.codecs import Raw, frame_chunk
from kvhold.core.api import leases_as_they_arrive
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import KEY_BYTES, Namespace, make_key
from kvhold.core.layout import Layout
from kvhold.memory.slab import ALIGNMENT
from kvhold.testing import CacheContract
from kvhold.testing.cache import (
    LAYOUTS,
    PLAIN,
    MakeCache,
    a_prompt,
    check,
    demanded_bytes,
    read,
    store,
)
from tests.cache.below import (
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    at_rest,
    bad_frames,
    cache_over,
    eventually,
    forget,
    is_at_baseline,
    on_disk,
    tier_counter,
)
from tests.tiers.memory import Place, a_place


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


class TestLocalCacheOverADisk(CacheContract):
    """The whole contract, with a disk below."""

    lower_tiers = True

    @pytest.fixture
    def make_cache(self, tmp_path: Path) -> Iterator[MakeCache]:
        opened: list[LocalCache] = []

        def make() -> LocalCache:
            opened.append(cache_over(on_disk(tmp_path / str(len(opened)))))
            return opened[-1]

        yield make
        for cache in opened:
            cache.close()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_was_evicted_comes_back_byte_for_byte(layout: Layout, tmp_path: Path) -> None:
    with a_cache_over(on_disk(tmp_path)) as cache:
        space = Namespace("model", layout, shards=2)
        cache.register(space)
        prompts = [
            a_prompt(space, num_tokens, seed) for seed, num_tokens in enumerate((92, 96, 17, 1))
        ]
        expected = []
        for prompt in prompts:
            for shard in (0, 1):
                store(cache, prompt, shard)
            expected.append(read(cache, prompt))
        forget(cache)
        assert cache.status()["chunks"] == 0
        assert [read(cache, prompt, shard) for prompt in prompts for shard in (0, 1)] == [
            n for n in expected for _ in (0, 1)
        ]
        assert expected[0] >= 80
        assert cache.status()["counters"]["kvhold_promoted_chunks"] > 0


def test_what_a_small_arena_evicts_by_itself_comes_back(tmp_path: Path) -> None:
    prompts = [a_prompt(HYBRID_SPACE, 90, seed) for seed in range(45)]
    with a_cache_over(on_disk(tmp_path), ram_bytes="8MiB", write_behind_bytes="2MiB") as cache:
        for prompt in prompts:
            store(cache, prompt)
            cache.flush()
        assert cache.status()["counters"]["kvhold_evicted_chunks{tier=ram}"] > 100
        assert [read(cache, prompt) for prompt in prompts] == [90] * 45


def test_a_closing_cache_writes_its_queue_and_the_next_one_finds_the_chunks(tmp_path: Path) -> None:
    prompts = [a_prompt(HYBRID_SPACE, 90, seed) for seed in range(8)]
    slow = "faults+" + on_disk(
        tmp_path, faults="put:delay:@1:1s", batch_bytes="64KiB", concurrent_calls=1
    )
    with cache_over(slow, drain_timeout_s=PATIENT_S) as cache:
        for prompt in prompts:
            store(cache, prompt)
        assert not at_rest(cache)
    with a_cache_over(on_disk(tmp_path)) as cache:
        assert [read(cache, prompt) for prompt in prompts] == [90] * 8
    with a_cache_over(on_disk(tmp_path)) as cache:
        assert [read(cache, prompt) for prompt in prompts] == [0] * 8, "it was cleared"


def test_what_arrives_is_lent_as_it_comes(tmp_path: Path) -> None:
    prompt = a_prompt(SPACE, 165)
    with a_cache_over(
        "faults+" + on_disk(tmp_path, faults="get:delay:1:10ms", batch_bytes=1, concurrent_calls=1)
    ) as cache:
        store(cache, prompt)
        forget(cache)
        ends = []
        with cache.lookup(prompt.query(), wait_s=0) as hit:
            for lease in leases_as_they_arrive(
                cache, hit, 16, until_s=time.monotonic() + PATIENT_S
            ):
                ends.append(lease.first_chunk * 16 + int(lease.num_tokens.sum()))
                check(lease, prompt, ends[-1])
            assert hit.num_tokens == ends[-1] == 165
        assert len(ends) > 3


def test_what_does_not_come_in_time_is_not_lent(place: Place) -> None:
    prompt = a_prompt(SPACE, 64)
    with cache_over(place.url()) as cache:
        store(cache, prompt)
        forget(cache)
        store(cache, a_prompt(SPACE, 32))
        eventually(lambda: at_rest(cache))
        place.hold("get")
        with cache.lookup(prompt.query(), wait_s=0) as hit:
            leased = [
                lease.num_tokens.tolist()
                for lease in leases_as_they_arrive(cache, hit, 16, until_s=time.monotonic())
            ]
            assert (leased, hit.num_tokens, hit.reason) == ([[16, 16]], 32, "deadline")
        place.let_go("get")
        is_at_baseline(cache)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fault", ["corrupt:0.1", "corrupt:0.1:40", "truncate:0.1", "swap:0.1", "stale:0.1"]
)
def test_faults_in_reads_make_hits_shorter_and_never_wrong(
    fault: str, seed: int, tmp_path: Path
) -> None:
    with a_cache_over(
        "faults+" + on_disk(tmp_path, faults=f"get:{fault}", faults_seed=seed)
    ) as cache:
        prompts = [a_prompt(HYBRID_SPACE, 90, seed) for seed in range(20)]
        for prompt in prompts:
            store(cache, prompt)
        forget(cache)
        found = [read(cache, prompt) for prompt in prompts]  # asserts that every byte is right
        assert 0 < sum(found) < 90 * 20
        if fault.startswith("stale"):
            assert bad_frames(cache) == {}
        else:
            assert sum(bad_frames(cache).values()) > 0
            removed = tier_counter(
                cache, "kvhold_tier_items", tier="disk", operation="delete", result="removed"
            )
            assert removed == sum(bad_frames(cache).values()), "each bad frame is removed"


@pytest.mark.parametrize("fault", ["truncate:0.1", "stale:0.1"])
def test_faults_in_probes_make_hits_shorter_and_never_wrong(fault: str, tmp_path: Path) -> None:
    with a_cache_over("faults+" + on_disk(tmp_path, faults=f"probe:{fault}")) as cache:
        prompts = [a_prompt(HYBRID_SPACE, 90, seed) for seed in range(20)]
        for prompt in prompts:
            store(cache, prompt)
        forget(cache)
        assert 0 < sum(read(cache, prompt) for prompt in prompts) < 90 * 20


class TestFrames:
    """With a tier of the test's own, whose values it can change."""

    def key(self, chunk: int) -> bytes:
        return make_key(SPACE.digest, a_prompt(SPACE, 48).hash_at(chunk), 0, 0)

    def frame(self, chunk: int, **changes: object) -> bytes:
        """A frame as the cache would write it, but for what is changed."""
        key = self.key(chunk)
        fields: dict[str, Any] = {
            "key": key,
            "layout": PLAIN,
            "num_tokens": 16,
            "first_token": 16 * chunk,
            "align": ALIGNMENT,
        } | changes
        layout: Layout = fields["layout"]
        chunk_bytes = demanded_bytes(key, layout.chunk_bytes(0, fields["num_tokens"])).data
        frame = frame_chunk(chunk_bytes, Raw(), **fields)
        return bytes(frame.header) + bytes(frame.payload)

    def test_it_is_written_as_it_is_read_here(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            store(cache, a_prompt(SPACE, 48))
            cache.flush()
            assert place.values[self.key(1)] == self.frame(1)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"first_token": 0}, "identity"),
            ({"num_tokens": 15}, "identity"),
            ({"layout": Layout(PLAIN.groups, tokens_per_chunk=32)}, "identity"),
            ({"key": b"k" * (KEY_BYTES - 4) + bytes(4)}, "identity"),
        ],
        ids=["first token", "tokens", "layout", "key"],
    )
    def test_one_of_another_identity_is_refused_counted_and_removed(
        self, place: Place, changes: dict[str, object], reason: str
    ) -> None:
        with a_cache_over(place.url()) as cache:
            for chunk in range(3):
                place.values[self.key(chunk)] = self.frame(chunk)
            place.values[self.key(1)] = self.frame(1, **changes)
            assert read(cache, a_prompt(SPACE, 48)) == 16
            assert bad_frames(cache) == {reason: 1}
            assert self.key(1) not in place.values
            assert set(place.values) == {self.key(0), self.key(2)}

    @pytest.mark.parametrize("align", [8, 512, 8192])
    def test_one_that_is_aligned_otherwise_is_good(self, place: Place, align: int) -> None:
        with a_cache_over(place.url()) as cache:
            for chunk in range(3):
                place.values[self.key(chunk)] = self.frame(chunk, align=align)
            assert read(cache, a_prompt(SPACE, 48)) == 48
            assert bad_frames(cache) == {}

    @pytest.mark.parametrize(
        "value", [b"", b"x", b"KVF", bytes(100), bytes(4096 + 12288), bytes(1 << 20)], ids=len
    )
    def test_what_is_no_frame_is_refused_alone(self, place: Place, value: bytes) -> None:
        with a_cache_over(place.url()) as cache:
            for chunk in range(3):
                place.values[self.key(chunk)] = self.frame(chunk)
            place.values[self.key(2)] = value
            assert read(cache, a_prompt(SPACE, 48)) == 32
            eventually(lambda: at_rest(cache))
            assert place.values.keys() >= {self.key(0), self.key(1)}
            if 0 < len(value) < 1 << 20:
                assert self.key(2) not in place.values

    def test_every_bit_of_it_matters(self, place: Place) -> None:
        luck = random.Random(7)
        with a_cache_over(place.url()) as cache:
            good = self.frame(0)
            for bit in [
                *range(0, 8 * 300, 97),
                *(luck.randrange(8 * len(good)) for _ in range(60)),
            ]:
                bad = bytearray(good)
                bad[bit // 8] ^= 1 << bit % 8
                place.values = {self.key(0): bytes(bad)}
                assert read(cache, a_prompt(SPACE, 16)) == 0, f"bit {bit}"
                assert place.values == {}

    @pytest.mark.parametrize("align", [ALIGNMENT, 512])
    def test_one_that_has_expired_is_a_miss_and_removed(self, place: Place, align: int) -> None:
        with a_cache_over(place.url()) as cache:
            place.values = {
                self.key(0): self.frame(0),
                self.key(1): self.frame(1, expires_at=int(time.time()) - 1, align=align),
            }
            assert read(cache, a_prompt(SPACE, 48)) == 16
            assert self.key(1) not in place.values
            assert bad_frames(cache) == {}
            assert tier_counter(cache, "kvhold_expired_chunks", tier="plugin") == 1

    def test_one_that_expires_later_expires_in_memory_too(self, place: Place) -> None:
        with a_cache_over(place.url()) as cache:
            place.values = {self.key(0): self.frame(0, expires_at=int(time.time()) + 1000)}
            assert read(cache, a_prompt(SPACE, 16)) == 16
            with cache._lock:
                cache._state.ram._clock = lambda: time.time() + 1001
            assert read(cache, a_prompt(SPACE, 16)) == 0

    def test_read_only_tiers_keep_what_is_bad_and_what_is_cleared(self, place: Place) -> None:
        with a_cache_over(place.url(read_only="true")) as cache:
            place.values = {self.key(0): self.frame(0), self.key(1): self.frame(1, first_token=3)}
            assert read(cache, a_prompt(SPACE, 48)) == 16
            store(cache, a_prompt(SPACE, 48, seed=5))
            assert cache.flush()
            cache.clear()
            assert set(place.values) == {self.key(0), self.key(1)}
            assert place.calls["put"] == place.calls["delete"] == place.calls["scan"] == 0


def test_eight_threads_that_use_a_cache_at_once_read_only_the_right_bytes(
    tmp_path: Path,
) -> None:
    rules = "get:corrupt:0.02,get:error:0.02,put:error:0.02,get:delay:0.05:20ms"
    url = "faults+" + on_disk(
        tmp_path, faults=rules, concurrent_calls=2, batch_bytes="128KiB", breaker_failures=1000
    )
    with a_cache_over(url, ram_bytes="8MiB", write_behind_bytes="512KiB") as cache:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda seed: live(cache, seed), range(8)))
        assert sum(found) > 0
        counters = cache.status()["counters"]
        assert counters["kvhold_promoted_chunks"] > 0
        assert counters["kvhold_evicted_chunks{tier=ram}"] > 0


def live(cache: LocalCache, seed: int) -> int:
    """One engine's life. Returns how many tokens it found."""
    luck, found = random.Random(seed), 0
    for _ in range(150):
        prompt = a_prompt(HYBRID_SPACE, luck.randrange(16, 150), luck.randrange(60))
        step = luck.random()
        if step < 0.45:
            found += read(cache, prompt)
        elif step < 0.8:
            store(cache, prompt)
        elif step < 0.85:
            with cache.lookup(
                prompt.query(), wait_s=0
            ) as hit:  # let go while it arrives, or claimed before all has
                if luck.random() < 0.5 and (lease := cache.claim(hit.ticket)) is not None:
                    with lease:
                        check(lease, prompt, int(lease.num_tokens.sum()))
        elif step < 0.9:
            with cache.lookup(prompt.query(), wait_s=0.001) as hit:
                assert not hit.arriving
        elif step < 0.95:
            cache.prefetch(prompt.query())
        elif step < 0.995:
            cache.flush(deadline_s=0.01)
        else:
            cache.clear(luck.choice([None, SPACE.digest, HYBRID_SPACE.digest]), deadline_s=5)
    return found


def test_a_close_under_the_feet_of_threads_ends_all_their_calls(tmp_path: Path) -> None:
    def until_closed(seed: int) -> str:
        try:
            while True:
                live(cache, seed)
        except KVHoldError as error:
            return str(error)

    url = "faults+" + on_disk(tmp_path, faults="get:delay:1:5ms")
    with ThreadPoolExecutor(8) as pool, cache_over(url, ram_bytes="8MiB") as cache:
        lives = [pool.submit(until_closed, seed) for seed in range(6)]
        eventually(lambda: cache.status()["counters"].get("kvhold_promoted_chunks"))
        closings = [pool.submit(cache.close) for _ in range(2)]
        assert all("closed" in life.result(60) for life in lives)
        for closing in closings:
            closing.result(60)
