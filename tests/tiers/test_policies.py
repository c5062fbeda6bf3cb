"""The policies we ship: each keeps the contract, and each has its own order."""

from collections.abc import Iterable, Iterator
from heapq import heapify
from typing import Any

import pytest

from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.testing import PolicyContract
from kvhold.testing.policy import Known
from kvhold.tiers.policies import (
    POLICIES,
    FifoPolicy,
    LfuPolicy,
    LruPolicy,
    MruPolicy,
    Policy,
    S3FifoPolicy,
    chains,
    make_policy,
)
from kvhold.tiers.ram import Entry, RamTier, Wanted
from tests.cache.scripted import arena_of


def num_places(queue: chains.Queue) -> int:
    return sum(map(len, queue._buckets.values()))


class TestLruPolicy(PolicyContract):
    def make_policy(self) -> Policy:
        return LruPolicy()

    def rank(self, known: Known) -> int:
        return known.touched_at


class TestMruPolicy(PolicyContract):
    def make_policy(self) -> Policy:
        return MruPolicy()

    def rank(self, known: Known) -> int:
        return -known.touched_at


class TestFifoPolicy(PolicyContract):
    def make_policy(self) -> Policy:
        return FifoPolicy()

    def rank(self, known: Known) -> int:
        return known.inserted_at


class TestLfuPolicy(PolicyContract):
    def make_policy(self) -> Policy:
        return LfuPolicy()

    def rank(self, known: Known) -> tuple[int, int]:
        return known.uses, known.touched_at


class TestS3FifoPolicy(PolicyContract):
    def make_policy(self) -> Policy:
        return S3FifoPolicy()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_chosen_in_the_settings(name: str) -> None:
    assert load_config({"policy": name}, environ={}).policy == name
    assert len(make_policy(name)) == 0


def test_the_settings_name_no_policy_that_does_not_exist() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"policy": "?"}, environ={})
    assert str(error.value).endswith(f"must be one of {', '.join(POLICIES)}")


def key(number: int) -> bytes:
    return number.to_bytes(40, "big")


def keys(numbers: Iterable[int]) -> list[bytes]:
    return list(map(key, numbers))


def insert(policy: Policy, numbers: Iterable[int], nbytes: int = 1) -> None:
    for number in numbers:
        policy.insert(key(number), nbytes)


def victims(policy: Policy, nbytes: int, pinned: Iterable[int] = ()) -> list[int]:
    return [
        int.from_bytes(victim, "big")
        for victim in policy.victims(nbytes, set(keys(pinned)).__contains__)
    ]


def evict(policy: Policy, nbytes: int) -> list[int]:
    gone = victims(policy, nbytes)
    for number in gone:
        policy.remove(key(number), evicted=True)
    return gone


def hit(policy: Policy, *numbers: int) -> None:
    for number in numbers:
        policy.touch(key(number))


def insert_prompt(policy: Policy, numbers: Iterable[int]) -> None:
    """Chunks that continue each other, last one first, as a cache commits them."""
    chain = keys(numbers)
    for each, parent in reversed([*zip(chain, [None, *chain], strict=False)]):
        policy.insert(each, 1, parent)


def readmit(policy: Policy, number: int) -> None:
    """Put a key at the end of an S3-FIFO's main queue: it goes while it is new, and comes back at
    once.
    """
    insert(policy, [number])
    policy.remove(key(number), evicted=True)
    insert(policy, [number])


def three(name: str, hits: Iterable[int] = ()) -> Policy:
    """1, 2 and 3, inserted in that order, and then `hits`."""
    policy = make_policy(name)
    insert(policy, [1, 2, 3])
    hit(policy, *hits)
    return policy


class TestTheOrderEachPolicyIsNamedFor:
    def test_lru_takes_the_one_that_nobody_asked_for_longest(self) -> None:
        assert victims(three("lru", hits=[1]), 2) == [2, 3]
        assert victims(three("lru", hits=[1]), 2, pinned=[2]) == [3, 1]

    def test_fifo_takes_the_oldest_whoever_was_asked_for(self) -> None:
        assert victims(three("fifo", hits=[1, 3, 2]), 2) == [1, 2]
        assert victims(three("fifo", hits=[1, 3, 2]), 2, pinned=[1]) == [2, 3]

    def test_lfu_evicts_the_least_used_leaf_and_of_equals_the_oldest(
        self,
    ) -> None:
        assert victims(three("lfu", hits=[3, 3, 2, 2, 1]), 2) == [1, 3]
        assert victims(three("lfu", hits=[3, 3, 2, 2, 1]), 2, pinned=[1]) == [3, 2]

    def test_mru_takes_the_one_asked_for_last(self) -> None:
        assert victims(three("mru", hits=[1]), 2) == [1, 3]
        assert victims(three("mru", hits=[1]), 2, pinned=[3]) == [1, 2]

    def test_lfu_forgets_the_uses_of_what_has_gone(self) -> None:
        policy = three("lfu", hits=[1, 1, 1, 2, 3])
        policy.remove(key(1), evicted=True)
        insert(policy, [1])
        assert victims(policy, 1) == [1]

    def test_lfu_keeps_a_uses_count_when_a_key_is_put_again(self) -> None:
        """D21: a second put neither resets the count nor leaves the key under its old one."""
        policy = three("lfu", hits=[1, 1, 2, 3])
        insert(policy, [1])
        assert victims(policy, 3) == [2, 3, 1]
        hit(policy, 2, 2)
        assert victims(policy, 3) == [3, 1, 2]
        assert evict(policy, 3) == [3, 1, 2]
        assert len(policy) == 0

    @pytest.mark.parametrize("name", POLICIES)
    def test_a_touch_of_a_key_before_its_insert_is_harmless(self, name: str) -> None:
        """D21: no KeyError, and no count for what is not there."""
        policy = make_policy(name)
        hit(policy, 1, 1)
        insert(policy, [1, 2])
        assert sorted(victims(policy, 2)) == [1, 2]


class TestPromptsOrder:
    """Two prompts, 10 to 14 and 20 to 24, of which the first was stored first."""

    @pytest.fixture(params=POLICIES)
    def policy(self, request: pytest.FixtureRequest) -> Policy:
        policy = make_policy(request.param)
        insert_prompt(policy, range(10, 15))
        insert_prompt(policy, range(20, 25))
        return policy

    def test_every_prompt_goes_from_its_end(self, policy: Policy) -> None:
        gone = victims(policy, 10)
        assert [n for n in gone if n < 20] == [14, 13, 12, 11, 10]
        assert [n for n in gone if n >= 20] == [24, 23, 22, 21, 20]

    def test_one_chunk_at_a_time_is_as_good_as_all_at_once(self, policy: Policy) -> None:
        expected = victims(policy, 10)
        assert [number for _ in range(10) for number in evict(policy, 1)] == expected

    def test_the_oldest_prompt_goes_first(self) -> None:
        for name in ("lru", "fifo", "lfu", "s3fifo"):
            policy = make_policy(name)
            insert_prompt(policy, range(10, 15))
            insert_prompt(policy, range(20, 25))
            assert victims(policy, 6) == [14, 13, 12, 11, 10, 24], name

    def test_mru_evicts_the_newest_leaf_and_then_the_newest_of_the_rest(self) -> None:
        policy = make_policy("mru")
        insert_prompt(policy, range(10, 15))
        insert_prompt(policy, range(20, 25))
        assert victims(policy, 6) == [24, 23, 22, 21, 20, 14]
        hit(policy, 14, 13, 12, 11, 10)
        assert victims(policy, 6) == [14, 13, 12, 11, 10, 24]

    def test_a_shared_beginning_stays_while_a_branch_of_it_does(self) -> None:
        policy = make_policy("lru")
        insert_prompt(policy, [1, 2, 3, 4])
        policy.insert(key(5), 1, key(2))
        hit(policy, 3)
        assert victims(policy, 5) == [4, 5, 3, 2, 1]
        assert victims(policy, 3, pinned=[5]) == []
        assert victims(policy, 2, pinned=[5]) == [4, 3]

    def test_a_chunk_that_becomes_a_leaf_takes_the_place_it_deserves(self) -> None:
        policy = make_policy("lru")
        insert_prompt(policy, [1, 2])
        insert(policy, [3, 4])
        hit(policy, 1)  # the stem is the newest of all
        assert victims(policy, 4) == [2, 3, 4, 1]
        policy.remove(key(2))
        assert victims(policy, 3) == [3, 4, 1]

    def test_s3fifo_takes_the_prefix_along_to_the_main_queue(self) -> None:
        policy = S3FifoPolicy()
        insert_prompt(policy, range(10))
        hit(policy, *range(10))
        insert(policy, range(100, 130))
        assert evict(policy, 1) == [100]  # the prompt's turn came first, and it moved on, whole
        assert evict(policy, 28) == [*range(101, 129)]
        assert policy.nbytes() == 11
        assert evict(policy, 1) == [9]  # the small queue is down to its share

    def test_s3fifo_leaves_the_prefix_its_round_that_is_in_the_main_queue_already(self) -> None:
        policy = S3FifoPolicy()
        insert_prompt(policy, [0, 1])
        hit(policy, 0, 1)
        insert(policy, range(100, 130))
        assert evict(policy, 1) == [100]
        hit(policy, 1)
        policy.insert(key(2), 1, key(1))
        hit(policy, 2)
        assert evict(policy, 29) == [*range(101, 130)]
        insert(policy, range(200, 220))
        assert evict(policy, 20) == [*range(200, 220)]  # 2 came first, and moved on
        assert evict(policy, 1) == [2]
        readmit(policy, 300)
        assert victims(policy, 1) == [300]  # 1 is older, was asked for, and goes round once more

    def test_what_was_cleared_is_new_when_it_comes_back_to_an_s3fifo(self) -> None:
        cleared, evicted = S3FifoPolicy(), S3FifoPolicy()
        for policy in (cleared, evicted):
            insert(policy, range(10))
            policy.remove(key(0), evicted=policy is evicted)
            insert(policy, [0, 10])
        assert victims(cleared, 11) == [*range(1, 10), 0, 10]
        assert victims(evicted, 11) == [*range(1, 10), 10, 0]


class TestMemory:
    """These look inside, because nothing else could tell."""

    @pytest.mark.parametrize("name", POLICIES)
    def test_places_that_touches_left_behind_are_swept(self, name: str) -> None:
        policy: Any = make_policy(name)
        insert(policy, range(100))
        for _ in range(100):
            hit(policy, *range(100))
        assert all(num_places(queue) <= 200 for queue in policy._all.queues.values())

    @pytest.mark.parametrize("name", POLICIES)
    def test_no_call_sorts_many_places_however_many_leaves_there_are(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sorted_at_once: list[int] = []

        def counted(places: list[Any]) -> None:
            sorted_at_once.append(len(places))
            heapify(places)

        monkeypatch.setattr(chains, "heapify", counted)
        policy: Any = make_policy(name)
        insert(policy, range(20_000))
        hit(policy, *range(0, 20_000, 3))
        for number in range(0, 20_000, 2):
            policy.remove(key(number))
        assert sorted_at_once
        assert max(sorted_at_once) <= 1000
        assert sum(num_places(queue) for queue in policy._all.queues.values()) <= 20_000

    @pytest.mark.parametrize("name", POLICIES)
    def test_of_keys_that_have_gone_nothing_is_left(self, name: str) -> None:
        policy: Any = make_policy(name)
        # each in a namespace of its own, and the one that it continues there
        for number in range(1, 50):
            space = bytes([number]) * 16
            policy.insert(space + bytes(24), 1, space + b"parent".ljust(24))
            policy.remove(space + bytes(24))
        assert (len(policy._chunks), len(policy._continued), len(policy._spaces)) == (0, 0, 0)
        assert len(policy._dropped) <= 1


def test_chunks_stay_near_their_writers_in_memory_that_is_full() -> None:
    """Two ranks store equal numbers of chunks, as tensor parallel workers do."""
    chunk_bytes, numa_nodes = 128 << 10, (3, 7)
    ram = RamTier(arena_of(64 << 20), make_policy("lru"), Metrics(), numa_nodes=numa_nodes)
    near = [0, 0]
    for number in range(4_000):
        for rank, numa_node in enumerate(numa_nodes):
            entries = ram.reserve_all(
                [Wanted(key(2 * number + rank), chunk_bytes, None)],
                num_tokens=1,
                first_token=0,
                numa_node=numa_node,
            )
            assert entries is not None
            ram.commit(entries[0])
            near[rank] += number >= 1_000 and entries[0].offset // (32 << 20) == rank
    assert min(near) >= 0.95 * 3_000
    assert ram.used_bytes >= 0.97 * ram.capacity_bytes


def test_a_writer_whose_numa_node_is_unknown_gets_memory_anywhere() -> None:
    ram = RamTier(arena_of(8 << 20), make_policy("lru"), Metrics(), numa_nodes=(0, 1))
    for number in range(200):
        wanted = [Wanted(key(number), 128 << 10, None)]
        entries = ram.reserve_all(wanted, num_tokens=1, first_token=0, numa_node=number % 3 + 1)
        assert entries is not None
        ram.commit(entries[0])
    assert ram.used_bytes >= 0.9 * ram.capacity_bytes


class TestRamKeepsPrefixes:
    """As a tier drives its policy: 16 chunks fit, and chunk i of a prompt continues chunk i - 1."""

    CHUNK = 128 << 10

    @pytest.fixture(params=POLICIES)
    def ram(self, request: pytest.FixtureRequest) -> Iterator[RamTier]:
        with Arena.create(16 * self.CHUNK, huge_pages="never") as arena:
            yield RamTier(arena, make_policy(request.param), Metrics())

    def reserve(self, ram: RamTier, number: int, parent: int | None = None) -> Entry | None:
        wanted = Wanted(key(number), self.CHUNK, None if parent is None else key(parent))
        entries = ram.reserve_all([wanted], num_tokens=1, first_token=0)
        return entries[0] if entries else None

    def add(self, ram: RamTier, number: int, parent: int | None = None) -> None:
        entry = self.reserve(ram, number, parent)
        assert entry is not None
        ram.commit(entry)

    def held(self, ram: RamTier) -> set[int]:
        return {int.from_bytes(entry.key, "big") for entry in ram.entries()}

    def test_a_full_arena_evicts_from_the_end_of_a_prompt(self, ram: RamTier) -> None:
        for number in range(16):
            self.add(ram, number, number - 1 if number else None)
        self.add(ram, 100)
        self.add(ram, 101)
        assert self.held(ram) >= set(range(14))

    def test_what_a_chunk_continues_is_not_evicted_for_it(self, ram: RamTier) -> None:
        for number in range(16):
            self.add(ram, number, number - 1 if number else None)
        # the last chunk's place is the only one, and it is what the new one continues
        for _ in range(3):
            assert self.reserve(ram, 16, 15) is None
        self.add(ram, 100)
        assert 15 not in self.held(ram)

    def test_what_is_being_written_keeps_its_whole_prefix(self, ram: RamTier) -> None:
        for number in range(8):
            self.add(ram, number, number - 1 if number else None)
        writing = self.reserve(ram, 8, 7)
        assert writing is not None
        for number in range(100, 130):
            self.add(ram, number)
        assert self.held(ram) >= set(range(9))
        ram.commit(writing)
        for number in range(200, 230):
            self.add(ram, number)
        left = self.held(ram) & set(range(9))
        assert left == set(range(len(left)))

    @pytest.mark.parametrize("cleared", [False, True])
    @pytest.mark.parametrize("end", ["commit", "abandon"])
    def test_a_prefix_is_free_to_go_once_nothing_is_written_after_it(
        self, ram: RamTier, end: str, cleared: bool
    ) -> None:
        self.add(ram, 1)
        writing = self.reserve(ram, 2, 1)
        assert writing is not None
        if cleared:
            ram.remove(writing)
        (ram.commit if end == "commit" else ram.abandon)(writing)
        pinned = [entry for n in range(100, 116) if (entry := self.reserve(ram, n)) is not None]
        assert len(pinned) == 16
        assert self.held(ram) == set(range(100, 116))


class TestLruOrder:
    @pytest.fixture
    def policy(self) -> LruPolicy:
        policy = LruPolicy()
        insert(policy, [1, 2, 3])
        return policy

    def test_the_first_in_goes_first(self, policy: LruPolicy) -> None:
        assert victims(policy, 2) == [1, 2]

    def test_a_hit_makes_a_key_the_newest(self, policy: LruPolicy) -> None:
        policy.touch(key(1))
        assert victims(policy, 2) == [2, 3]
        policy.touch(key(2))
        assert victims(policy, 2) == [3, 1]

    def test_a_new_key_is_newer_than_one_that_was_hit(self, policy: LruPolicy) -> None:
        policy.touch(key(1))
        insert(policy, [4])
        assert victims(policy, 4) == [2, 3, 1, 4]

    def test_pinned_keys_are_passed_over_and_keep_their_age(self, policy: LruPolicy) -> None:
        assert victims(policy, 2, pinned=[1]) == [2, 3]
        assert victims(policy, 1, pinned=[1, 2]) == [3]
        assert victims(policy, 2) == [1, 2]

    def test_no_more_go_than_are_needed(self) -> None:
        policy = LruPolicy()
        for number, nbytes in ((1, 5), (2, 10), (3, 5)):
            policy.insert(key(number), nbytes)
        assert [victims(policy, nbytes) for nbytes in (1, 5, 6, 15, 16, 20)] == [
            [1],
            [1],
            [1, 2],
            [1, 2],
            [1, 2, 3],
            [1, 2, 3],
        ]

    def test_touching_a_prompt_from_its_end_makes_its_suffix_go_first(
        self, policy: LruPolicy
    ) -> None:
        for number in (3, 2, 1):
            policy.touch(key(number))
        assert victims(policy, 3) == [3, 2, 1]


class TestS3FifoOrder:
    @pytest.fixture
    def policy(self) -> S3FifoPolicy:
        return S3FifoPolicy()

    def test_of_keys_never_asked_for_the_first_in_goes_first(self, policy: S3FifoPolicy) -> None:
        insert(policy, range(10))
        assert victims(policy, 3) == [0, 1, 2]

    def test_one_hit_wonders_leave_before_what_was_asked_for(self, policy: S3FifoPolicy) -> None:
        insert(policy, range(10))
        for number in range(5):
            policy.touch(key(number))
        assert evict(policy, 5) == [5, 6, 7, 8, 9]
        assert len(policy) == 5

    def test_a_scan_does_not_wipe_hot_keys(self, policy: S3FifoPolicy) -> None:
        insert(policy, range(50))
        for number in range(50):
            policy.touch(key(number))
        insert(policy, range(50, 100))
        gone: set[int] = set()
        for number in range(1000, 3000):  # twenty times what fits, each asked for once
            gone.update(evict(policy, 1))
            insert(policy, [number])
        assert gone.isdisjoint(range(50))
        assert len(policy) == 100

    def test_the_same_scan_wipes_an_lru(self) -> None:
        policy = LruPolicy()
        insert(policy, range(50))
        gone: set[int] = set()
        for number in range(1000, 1050):
            gone.update(evict(policy, 1))
            insert(policy, [number])
        assert gone == set(range(50))

    def test_a_key_that_comes_back_soon_is_readmitted_among_the_lasting(
        self, policy: S3FifoPolicy
    ) -> None:
        insert(policy, range(10))
        assert evict(policy, 1) == [0]
        insert(policy, [0])  # its ghost is still there
        insert(policy, range(10, 20))
        assert evict(policy, 15) == [*range(1, 16)]
        assert 0 not in evict(policy, 3)

    def test_a_key_that_comes_back_late_is_new_again(self, policy: S3FifoPolicy) -> None:
        insert(policy, range(10))
        assert evict(policy, 1) == [0]
        for number in range(10, 60):
            evict(policy, 1)
            insert(policy, [number])
        insert(policy, [0])  # its ghost has been pushed out by others
        insert(policy, [60, 61])
        assert evict(policy, 12) == [*range(51, 60), 0, 60, 61]

    def test_ghosts_are_no_more_than_the_keys_held(self, policy: S3FifoPolicy) -> None:
        for number in range(1000):
            insert(policy, [number])
            if number >= 10:
                evict(policy, 1)
        assert len(policy) == 10
        # Names of chunks that have gone cost memory, too; this looks inside because nothing else
        # could tell.
        assert len(policy._ghosts) <= 10

    def test_a_key_is_readmitted_once_for_each_time_it_was_new(self, policy: S3FifoPolicy) -> None:
        for number in range(11):
            readmit(policy, number)
        policy.remove(key(10), evicted=True)  # from the main queue: it leaves no ghost
        insert(policy, [10, 11])
        assert evict(policy, 1) == [10]

    def test_a_hit_in_the_main_queue_is_one_more_round(self, policy: S3FifoPolicy) -> None:
        for number in range(3):
            readmit(policy, number)
        policy.touch(key(0))
        assert evict(policy, 1) == [1]
        readmit(policy, 3)
        assert evict(policy, 3) == [2, 0, 3]

    def test_many_hits_of_long_ago_are_three_rounds(self, policy: S3FifoPolicy) -> None:
        for number in range(2):
            readmit(policy, number)
        for _ in range(100):
            policy.touch(key(0))
        gone = []
        for number in range(2, 12):
            readmit(policy, number)
            gone += evict(policy, 1)
        assert gone == [1, 2, 3, 4, 5, 6, 0, 7, 8, 9]

    def test_pinned_keys_are_passed_over(self, policy: S3FifoPolicy) -> None:
        insert(policy, range(10))
        assert victims(policy, 3, pinned=[0, 2]) == [1, 3, 4]
        assert victims(policy, 3) == [0, 1, 2]

    def test_asking_in_vain_changes_no_order(self, policy: S3FifoPolicy) -> None:
        insert(policy, range(10))
        for number in (3, 4):
            policy.touch(key(number))
        for _ in range(5):
            assert victims(policy, 11) == []
        assert evict(policy, 8) == [0, 1, 2, 5, 6, 7, 8, 9]

    def test_the_main_queue_gives_way_once_the_small_one_is_down_to_its_share(
        self, policy: S3FifoPolicy
    ) -> None:
        for number in range(9):
            readmit(policy, number)
        insert(policy, range(100, 120))
        # one of ten is left in the small queue: its share
        assert victims(policy, 20) == [*range(100, 119), 0]
        assert evict(policy, 18) == [*range(100, 118)]
        assert evict(policy, 11) == [118, 0, 119, *range(1, 9)]

    def test_what_moves_on_counts_as_the_main_queues_at_once(self, policy: S3FifoPolicy) -> None:
        readmit(policy, 100)
        insert(policy, range(20))
        for number in range(18):
            policy.touch(key(number))
        assert evict(policy, 2) == [18, 100]

    def test_shares_are_of_bytes_not_of_keys(self, policy: S3FifoPolicy) -> None:
        insert(policy, [1], nbytes=1000)
        policy.touch(key(1))
        insert(policy, range(10, 20))
        assert evict(policy, 1) == [10]  # the large one has moved on
        assert evict(policy, 1) == [1]

    @pytest.mark.parametrize("nbytes", [1, 7, 50])
    def test_no_more_go_than_are_needed(self, policy: S3FifoPolicy, nbytes: int) -> None:
        insert(policy, range(50))
        for number in range(0, 50, 3):
            policy.touch(key(number))
        assert len(victims(policy, nbytes)) == nbytes
