"""The policies we ship: each keeps the contract, and each has its own order."""

from collections.abc import Iterable

import pytest

from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold.testing import PolicyContract
from kvhold.tiers.policies import POLICIES, LruPolicy, Policy, S3FifoPolicy, make_policy


class TestLruPolicy(PolicyContract):
    def make_policy(self) -> Policy:
        return LruPolicy()


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
    return [int.from_bytes(victim, "big") for victim in policy.victims(nbytes, set(keys(pinned)).__contains__)]


def evict(policy: Policy, nbytes: int) -> list[int]:
    gone = victims(policy, nbytes)
    for number in gone:
        policy.remove(key(number))
    return gone


def readmit(policy: Policy, number: int) -> None:
    """Put a key at the end of an S3-FIFO's main queue: it goes while it is new, and comes back at once."""
    insert(policy, [number])
    policy.remove(key(number))
    insert(policy, [number])


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
        assert [victims(policy, nbytes) for nbytes in (1, 5, 6, 15, 16, 20)] == [[1], [1], [1, 2], [1, 2], [1, 2, 3], [1, 2, 3]]

    def test_touching_a_prompt_from_its_end_makes_its_suffix_go_first(self, policy: LruPolicy) -> None:
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

    def test_a_key_that_comes_back_soon_is_readmitted_among_the_lasting(self, policy: S3FifoPolicy) -> None:
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
        # Names of chunks that have gone cost memory, too; this looks inside because nothing else could tell.
        assert len(policy._ghost) <= 10

    def test_a_key_is_readmitted_once_for_each_time_it_was_new(self, policy: S3FifoPolicy) -> None:
        for number in range(11):
            readmit(policy, number)
        policy.remove(key(10))  # from the main queue: it leaves no ghost
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

    def test_the_main_queue_gives_way_once_the_small_one_is_down_to_its_share(self, policy: S3FifoPolicy) -> None:
        for number in range(9):
            readmit(policy, number)
        insert(policy, range(100, 120))
        assert victims(policy, 20) == [*range(100, 119), 0]  # one of ten is left in the small queue: its share
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
