"""The learned policy: what it learns, what it evicts, and what it does not admit."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from kvhold.core.errors import ConfigError
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, NAMESPACE_BYTES, place_suffix
from kvhold.testing.policy import PolicyContract
from kvhold.tiers.policies import LearnedPolicy, LruPolicy, reuse_times
from kvhold.tiers.policies.base import NEUTRAL
from kvhold.tiers.policies.chains import Place
from kvhold.tiers.policies.ghosts import (
    MOST_KINDS,
    MOST_USES,
    Ghost,
    Ghosts,
    pack,
    queue_of,
    unpack,
)
from kvhold.tiers.policies.reuse_times import ReuseTimes, Use
from kvhold_lab.simulate.generators import GENERATORS, generate
from kvhold_lab.simulate.policy_replay import replay_class
from kvhold_lab.simulate.trace import Cut, trace_of
from tests.tiers.learnt import Clock, teach

DAY_S = 24 * 3600.0


def a_key(number: int) -> bytes:
    return b"a" * NAMESPACE_BYTES + number.to_bytes(HASH_BYTES, "big") + place_suffix(0, 0)


class TestContract(PolicyContract):
    def make_policy(self) -> LearnedPolicy:
        return LearnedPolicy(Clock())


class TestReuseTimes:
    """Kind 0 comes back after a minute, kind 1 never, kind 2 half of the time."""

    def learnt(self) -> ReuseTimes:
        times = ReuseTimes((3,))
        waiting: list[tuple[float, Use]] = []
        for second in range(0, 4000, 2):
            times.advance(float(second))
            while waiting and waiting[0][0] <= second:
                times.end(waiting.pop(0)[1])
            waiting.append((second + 60.0, times.use(0)))
            times.use(1)
            half = times.use(2)
            if second % 4:
                waiting.append((second + 60.0, half))
        return times

    def test_a_chunk_is_worth_more_the_more_probable_its_next_use_is(
        self,
    ) -> None:
        times = self.learnt()
        surely, never, perhaps = (times.worth_of_new(kind) for kind in range(3))
        assert surely > perhaps > never
        assert surely > 0.8
        assert 0.3 < perhaps < 0.7
        assert never < 0.1

    def test_what_is_overdue_is_worth_little(self) -> None:
        times = self.learnt()
        use = times.use(0)
        worth = [times.worth(use)]
        for seconds in (50.0, 200.0):
            times.advance(times.now_s + seconds)
            worth.append(times.worth(use))
        assert worth[1] > 0.8
        assert worth[2] < 0.3

    def test_no_chunk_is_worth_more_than_a_sure_use_however_few_reach_its_age(self) -> None:
        hazards = np.zeros((1, 44))
        hazards[:, :26] = 0.9
        yields, (worths,) = reuse_times._evaluate(hazards, [0.01])
        assert worths.min() >= 0.0
        assert worths.max() <= 1.0
        assert worths[0, 25] == pytest.approx(worths[0, 24], rel=0.5)
        assert worths[0, 30] == 0.0 == yields[0, 30]

    def test_a_chunk_below_the_price_is_worth_0_and_below_0_before_it_is_stored(
        self,
    ) -> None:
        times = self.learnt()
        for _ in range(500):
            times.advance(times.now_s + 0.5)
            times.evicted(times.use(0))
        use = times.use(1)
        assert times.worth_of_new(1) < 0.0
        for _ in range(20):
            assert times.worth(use) == 0.0
            times.advance(times.now_s + 0.5)

    def test_an_open_interval_counts_only_for_the_ages_that_it_has_reached(self) -> None:
        """Else all chunks of a new server would seem to come back never."""
        times = ReuseTimes((1,))
        before = times.worth_of_new(0)
        for _ in range(40):
            times.advance(times.now_s + 0.3)
            times.use(0)
        assert times.worth_of_new(0) == pytest.approx(before, rel=0.35)

    def test_what_is_forgotten_ends_nothing(self) -> None:
        times = ReuseTimes((1,))
        for _ in range(200):
            times.advance(times.now_s + 1.0)
            times.forget(times.use(0))
        unseen = ReuseTimes((1,))
        for _ in range(200):
            unseen.advance(unseen.now_s + 1.0)
        assert times.worth_of_new(0) == pytest.approx(unseen.worth_of_new(0))

    def test_a_use_is_found_again_by_its_time_however_long_ago(self) -> None:
        times = ReuseTimes((2,))
        uses = []
        for _ in range(500):
            times.advance(times.now_s + 7.0)
            uses.append((times.now_s, times.use(1)))
        for at_s, use in uses[::50]:
            found, num = times.use_at(1, at_s), times.num_open(use)
            times.forget(found)
            assert times.num_open(use) == num - 1

    def test_a_chunk_is_expected_after_the_median_of_the_times_that_are_left(self) -> None:
        times = self.learnt()
        for age_s in (0.0, 10.0, 40.0):
            expected_s = times.expected_s(0, age_s)
            assert expected_s is not None
            assert 40.0 < age_s + expected_s < 70.0
        assert times.expected_s(1, 0.0) is None, "most do not come back"
        assert times.expected_s(0, 3600.0) is None, "it is long overdue"
        assert ReuseTimes((3,)).expected_s(0, 0.0) is None, "nothing was learnt yet"

    @pytest.mark.parametrize("hazard", [0.9, 1.5, -0.1])
    @pytest.mark.parametrize("age_s", [0.0, 90 * DAY_S])
    def test_no_chunk_is_expected_in_the_past(self, hazard: float, age_s: float) -> None:
        """Counts are a little wrong where a chunk was taken for another."""
        times = self.learnt()
        times._round_hazards[:] = hazard
        expected_s = times.expected_s(0, age_s)
        assert (expected_s is None) == (hazard < 0)
        assert expected_s is None or expected_s >= 0.0

    def test_what_saves_more_pays_at_a_price_at_which_others_do_not(self) -> None:
        times = ReuseTimes((1,), (0.25, 1.0, 4.0))
        for factor in range(3):
            times.use_factor(factor)
        uses: list[Use] = []
        for second in range(2000):
            times.advance(float(second))
            use = times.use(0)
            if second % 10 == 0:
                uses.append(use)
            if second % 100 == 60:
                times.end(uses.pop())
            times.evicted(use, 1)
        worth = [times.worth_of_new(0, factor) for factor in range(3)]
        assert worth[0] <= worth[1] / 4
        assert worth[2] > 4 * worth[1]

    def test_a_place_below_has_the_same_worths_until_it_has_another_price(self) -> None:
        times = ReuseTimes((1,), (1.0, 4.0))
        times.use_factor(1)
        below = times.add_place()
        sold: list[float] = []
        for second in range(4000):
            times.advance(float(second))
            use = times.use(0)
            if second == 2000:
                sold = [below.worth(0, 0.0, factor) for factor in range(2)]
                assert sold == [times.worth_of_new(0, factor) for factor in range(2)]
                assert below.worth(0, 300.0, 0) == times.worth(times.use_at(0, 1700.0))
            if second > 2000:
                times.evicted(use)
                below.sell(below.worth_and_yield(0, DAY_S, 0)[1])  # such old chunks yield nothing
            times.end(use)
        assert times.worth_of_new(0) < sold[0] == pytest.approx(below.worth(0, 0.0, 0), rel=0.05)

    def test_old_counts_fade(self) -> None:
        times = self.learnt()
        for _ in range(2_000):  # kind 0 comes back no more
            times.advance(times.now_s + 40.0)
            times.use(0)
        assert times.worth_of_new(0) < 0.1

    def test_the_number_of_cohorts_is_limited(self) -> None:
        times = ReuseTimes((1,))
        for _ in range(3_000):
            times.advance(times.now_s + 30.0)
            times.use(0)
        assert times.num_cohorts < 200

    def test_the_ages_reached_in_a_long_pause_are_counted_in_several_short_ticks(self) -> None:
        times = ReuseTimes((280,))
        for _ in range(400):
            times.advance(times.now_s + 1.0)
            for kind in range(280):
                times.use(kind)
        num_cohorts = times.num_cohorts
        assert num_cohorts > 20
        times.advance(times.now_s + 50_000.0)
        assert sum(cohort.bucket < 30 for cohort in times._cohorts) > num_cohorts / 3
        assert times.num_cohorts > num_cohorts / 3
        for _ in range(20):
            times.advance(times.now_s + 0.25)
        assert times.num_cohorts < 5
        assert times._reached[:, 28] == pytest.approx(400, rel=0.01)  # 5793 s

    def test_equal_calls_have_equal_results(self) -> None:
        first, second = self.learnt(), self.learnt()
        assert [first.worth_of_new(kind) for kind in range(3)] == [
            second.worth_of_new(kind) for kind in range(3)
        ]


class TestGhosts:
    def test_what_is_remembered_is_found_until_it_is_taken(self) -> None:
        ghosts = Ghosts()
        for number in range(1000):
            past = pack(Ghost(2.0 * number, number % 280, 3))
            assert not ghosts.add(a_key(number), past, 3000.0)
        assert ghosts.num == 1000
        for number in range(1000):
            expected = Ghost(2.0 * number, number % 280, 3)
            assert unpack(ghosts.find(a_key(number)), 3000.0) == expected
            assert unpack(ghosts.take(a_key(number)), 3000.0) == expected
            assert not ghosts.find(a_key(number))
        assert ghosts.num == 0

    @pytest.mark.parametrize("later_s", [0.0, 2.0 * (1 << 22) - 100.0, 2.0 * (1 << 22) - 20.0])
    def test_the_oldest_of_a_full_set_is_replaced(self, later_s: float) -> None:
        ghosts = Ghosts(8)  # one set
        for number in range(8):
            ghosts.add(a_key(number), pack(Ghost(later_s + 10.0 * (number + 1), 1, 1)), later_s)
        now_s = later_s + 100.0
        replaced = ghosts.add(a_key(8), pack(Ghost(now_s, 1, 1)), now_s)
        assert unpack(replaced, now_s) == Ghost(later_s + 10.0, 1, 1)
        assert not ghosts.find(a_key(0))
        assert ghosts.num == 8

    def test_a_key_has_one_place(self) -> None:
        ghosts = Ghosts(8)
        ghosts.add(a_key(1), pack(Ghost(4.0, 7, 2)), 4.0)
        assert unpack(ghosts.add(a_key(1), pack(Ghost(8.0, 9, 3)), 8.0), 8.0) == Ghost(4.0, 7, 2)
        assert unpack(ghosts.find(a_key(1)), 8.0) == Ghost(8.0, 9, 3)
        assert ghosts.num == 1

    def test_uses_of_many_are_noted_at_once(self) -> None:
        ghosts = Ghosts(8)
        pasts = [pack(Ghost(20.0, 5, uses)) for uses in range(1, MOST_USES + 1)]
        assert ghosts.use_all([a_key(1), a_key(2)], pasts, 20.0) == ([], [])
        assert ghosts.use_all([a_key(2), a_key(3)], pasts, 20.0) == ([pasts[0]], [])
        assert [ghosts.find(a_key(number)) for number in (1, 2, 3)] == [
            pasts[uses] for uses in (0, 1, 0)
        ]
        known, replaced = ghosts.use_all(map(a_key, range(4, 10)), pasts, 20.0)
        assert (known, len(replaced)) == ([], 1)
        assert ghosts.num == 8

    def test_uses_of_those_that_are_known_alone(self) -> None:
        ghosts = Ghosts(8)
        pasts = [pack(Ghost(20.0, 5, uses)) for uses in range(1, MOST_USES + 1)]
        ghosts.use_all([a_key(1)], pasts, 20.0)
        assert ghosts.use_all(map(a_key, range(20)), pasts, 20.0, if_known=True) == ([pasts[0]], [])
        assert (ghosts.num, ghosts.find(a_key(1)), ghosts.find(a_key(2))) == (1, pasts[1], 0)

    def test_times_are_right_after_a_year(self) -> None:
        ghosts, now_s = Ghosts(), 365 * DAY_S
        ghosts.add(a_key(1), pack(Ghost(now_s - 90 * DAY_S, 1, 1)), now_s)
        found = unpack(ghosts.find(a_key(1)), now_s)
        assert found.at_s == pytest.approx(now_s - 90 * DAY_S, abs=2.0)

    def test_uses_are_counted_up_to_a_limit(self) -> None:
        ghosts = Ghosts()
        ghosts.add(a_key(1), pack(Ghost(0.0, 1, 1000)), 0.0)
        assert unpack(ghosts.take(a_key(1)), 0.0) == Ghost(0.0, 1, MOST_USES)

    def test_nine_bytes_each(self) -> None:
        assert Ghosts(1 << 10).nbytes == 9 << 10


class Memory:
    """A memory of some chunks, driven as `RamTier` drives its policy."""

    def __init__(self, num_chunks: int) -> None:
        self.clock = Clock()
        self.policy = LearnedPolicy(self.clock)
        self.here: set[bytes] = set()
        self.num_chunks = num_chunks

    def ask(self, numbers: Iterable[int]) -> int:
        """Look a prompt up, and store the rest. Return the number of chunks found."""
        keys = [a_key(number) for number in numbers]
        num_here = next((i for i, key in enumerate(keys) if key not in self.here), len(keys))
        prompt = self.policy.looked_up(keys, num_here)
        self.policy.used(keys[:num_here], prompt)
        self.policy.missed(keys[num_here:], prompt)
        self.policy.touch_all(reversed(keys[:num_here]))
        parent = keys[num_here - 1] if num_here else None
        for key in keys[num_here:]:
            if len(self.here) == self.num_chunks:
                victims = self.policy.victims(1, {parent}.__contains__, None, key)
                if not victims:
                    break
                for victim in victims:
                    self.policy.remove(victim, evicted=True)
                    self.here.remove(victim)
            self.policy.insert(key, 1, parent)
            self.here.add(key)
            parent = key
        return num_here


class TestWhatIsEvicted:
    def test_prompts_that_come_back_stay_while_others_pass_through(self) -> None:
        """Ten prompts come every 50 s; 20 that do not come back pass each second."""
        memory = Memory(200)
        found = 0
        for second in range(1200):
            memory.clock.now_s = float(second)
            if second % 5 == 0:
                number = second // 5 % 10
                found += memory.ask(range(1000 * number, 1000 * number + 4)) * (second >= 600)
            for one in range(5):
                first = 10**6 + 20 * (5 * second + one)
                memory.ask(range(first, first + 4))
        assert found > 0.8 * 4 * 120  # the least recently used would find none: 200 chunks, 10 s

    def test_what_is_not_admitted_is_learnt_from_too(self) -> None:
        memory = Memory(4)
        for second in range(1, 500):
            memory.clock.now_s = float(second)
            memory.ask([10**6 + second])
            memory.ask([second % 40])
        assert memory.policy.ghosts.num > 400

    def test_of_a_prompt_that_is_not_stored_nothing_new_is_awaited(self) -> None:
        memory = Memory(4)
        memory.ask([1])
        policy, keys = memory.policy, [a_key(number) for number in (1, 2, 3)]
        policy.remove(keys[0], evicted=True)
        kinds = [policy.looked_up(keys, 0) for _ in range(2)]
        policy.missed(keys, kinds[0], if_known=True)
        assert unpack(policy.ghosts.find(keys[0][:NAME_BYTES]), 0.0).uses == 2
        assert policy.ghosts.num == 1
        awaited = [use.num for use in policy.times._cohorts[-1].uses.values() if use.num]
        assert awaited == [1], "the chunk that was evicted"

    def test_a_cleared_chunk_is_not_remembered(self) -> None:
        memory = Memory(8)
        memory.ask([1, 2])
        for number in (2, 1):
            memory.policy.remove(a_key(number))
        assert memory.policy.ghosts.num == 0

    def test_a_loop_larger_than_memory_finds_a_part(self) -> None:
        """The least recently used finds nothing."""
        memory = Memory(50)
        found = 0
        for second in range(1500):
            memory.clock.now_s = float(second)
            found += memory.ask([second % 70]) * (second >= 1000)
        assert found > 0.4 * 500


class TestGroupsAndShards:
    """A prompt of 20 chunks in two groups and four shards, whose lookup found nothing."""

    @pytest.fixture
    def policy(self) -> LearnedPolicy:
        policy, keys = LearnedPolicy(Clock()), self.keys(0, 0)
        policy.missed(keys, policy.looked_up(keys, 0), 3)
        return policy

    def keys(self, group: int, shard: int) -> list[bytes]:
        return [a_key(number)[:NAME_BYTES] + place_suffix(group, shard) for number in range(20)]

    @pytest.mark.parametrize("shards", [range(4), range(3, -1, -1), (2, 0, 3, 1)])
    def test_all_groups_and_shards_of_a_chunk_have_its_kind_in_any_order_of_storing(
        self, policy: LearnedPolicy, shards: Iterable[int]
    ) -> None:
        expected = queue_of(policy.ghosts.find(a_key(0)[:NAME_BYTES]))
        for shard in shards:
            for pair in zip(self.keys(0, shard), self.keys(1, shard), strict=True):
                for key in pair:
                    policy.insert(key, 1)
        assert {chunk.queue for chunk in policy._chunks.values()} == {expected}
        assert policy.ghosts.num == 0

    def test_one_that_is_stored_again_is_of_the_kind_of_the_others(
        self, policy: LearnedPolicy
    ) -> None:
        for key in (*self.keys(0, 0), *self.keys(0, 1)):
            policy.insert(key, 1)
        policy.remove(self.keys(0, 1)[0], evicted=True)
        policy.used([*self.keys(0, 0), *self.keys(0, 1)], 9, 5)
        policy.insert(self.keys(0, 1)[0], 1)
        assert len({chunk.queue for chunk in policy._chunks.values()}) == 1
        assert policy.ghosts.num == 0


class TestWhatIsDeclined:
    """Memory has chunks that come back, and a chunk that does not is to be stored."""

    @pytest.fixture
    def memory(self) -> Memory:
        memory = Memory(2)
        memory.ask([1])
        memory.ask([2])
        first_use = kind_of(memory, 1)
        for number in (1, 2):
            memory.ask([number])
        assert kind_of(memory, 1) != first_use
        teach(memory.policy, memory.clock, back=kind_of(memory, 1), gone=first_use)
        for number in (1, 2):
            memory.ask([number])
        return memory

    def test_declined_is_set_if_a_chunk_is_worth_less_than_its_victim(self, memory: Memory) -> None:
        memory.ask([3])
        assert was_declined(memory.policy)
        assert memory.here == {a_key(1), a_key(2)}
        assert memory.policy.victims(1, lambda _: False) == [a_key(1)], "all are still candidates"
        assert not was_declined(memory.policy)

    def test_a_new_chunk_below_the_price_is_declined_and_old_ones_are_evicted_by_age(
        self, memory: Memory
    ) -> None:
        policy, times = memory.policy, memory.policy.times
        back = kind_of(memory, 1)
        for _ in range(2000):
            memory.clock.now_s += 2.0
            times.advance(memory.clock.now_s)
            use = times.use(back)
            times.evicted(use)
            times.forget(use)
        places = [policy._chunks.get(a_key(number)) for number in (1, 2)]
        assert [times.worth(chunk.use) for chunk in places if chunk and chunk.use] == [0.0, 0.0]
        memory.ask([3])
        assert was_declined(policy)
        policy.insert(a_key(4), 1)  # in no lookup, so it is admitted
        memory.here.add(a_key(4))
        assert policy.victims(3, lambda _: False, None, a_key(5)) == [a_key(n) for n in (1, 2, 4)]

    def test_a_chunk_for_which_all_is_pinned_is_not_declined(self, memory: Memory) -> None:
        policy = memory.policy
        policy.missed([a_key(3)], policy.looked_up([a_key(3)], 0))
        assert policy.victims(1, lambda _: True, None, a_key(3)) == []
        assert not was_declined(policy)
        assert policy.victims(1, {a_key(1)}.__contains__, None, a_key(3)) == []
        assert was_declined(policy)
        assert policy.victims(3, lambda _: False, None, a_key(3)) == [], "there is not as much"
        assert not was_declined(policy)


class TestWhatIsExpectedBack:
    """An evicted chunk that is used each minute, 40 s after its last use."""

    @pytest.fixture
    def memory(self) -> Memory:
        memory = Memory(2)
        memory.ask([1])
        memory.ask([2])
        gone = kind_of(memory, 1)
        for number in (1, 2):
            memory.ask([number])
        teach(memory.policy, memory.clock, back=kind_of(memory, 1), gone=gone)
        now_s, kind = memory.clock.now_s, kind_of(memory, 1)
        memory.policy.remove(a_key(1))
        memory.policy.ghosts.add(a_key(1)[:NAME_BYTES], pack(Ghost(now_s, kind, 2)), now_s)
        memory.clock.now_s += 40.0
        return memory

    def test_after_its_eviction(self, memory: Memory) -> None:
        at_once = memory.policy.expected_back_s(a_key(1), 0.0)
        assert at_once is not None
        assert 2.0 < at_once < 30.0
        memory.clock.now_s += 200.0
        later = memory.policy.expected_back_s(a_key(1), 200.0)
        assert later == pytest.approx(at_once, abs=2.0), "what was expected then counts"

    def test_no_return_is_expected_of_a_present_unknown_or_meanwhile_used_chunk(
        self, memory: Memory
    ) -> None:
        policy = memory.policy
        assert policy.expected_back_s(a_key(2), 0.0) is None
        assert policy.expected_back_s(a_key(99), 0.0) is None
        policy.missed([a_key(1)], policy.looked_up([a_key(1)], 0))
        assert policy.expected_back_s(a_key(1), 30.0) is None

    def test_a_policy_that_learns_nothing_expects_nothing(self) -> None:
        assert LruPolicy().expected_back_s(a_key(1), 0.0) is None


def was_declined(policy: LearnedPolicy) -> bool:
    return policy.declined


def kind_of(memory: Memory, number: int) -> int:
    chunk = memory.policy._chunks.get(a_key(number))
    assert chunk is not None
    return chunk.queue % MOST_KINDS


class TestValues:
    """Chunks of one kind and age, of different values."""

    def stored(self, values: Sequence[int], wanted: int = NEUTRAL) -> LearnedPolicy:
        policy = LearnedPolicy(Clock())
        for number, value in enumerate(values):
            prompt = policy.looked_up([a_key(number)], 0)
            policy.missed([a_key(number)], prompt, value)
            policy.insert(a_key(number), 1)
        policy.missed([a_key(99)], policy.looked_up([a_key(99)], 0), wanted)
        return policy

    def victims(self, policy: LearnedPolicy, num_chunks: int) -> list[bytes]:
        return policy.victims(num_chunks, lambda _: False, None, a_key(99))

    def test_the_least_value_is_evicted_first_then_the_oldest(self) -> None:
        policy = self.stored([NEUTRAL, NEUTRAL + 2, NEUTRAL - 1, NEUTRAL, NEUTRAL - 1], 15)
        assert self.victims(policy, 4) == [a_key(number) for number in (2, 4, 0, 3)]

    def test_what_comes_after_a_pinned_chunk_is_compared_again(self) -> None:
        """Chunks 0 and 1 are in one queue, and chunk 1 is new."""
        clock = Clock()
        policy = LearnedPolicy(clock)
        policy.insert(a_key(0), 1)
        clock.now_s = 3500.0
        policy.insert(a_key(1), 1)
        policy.insert(a_key(2), 1)
        policy.used([a_key(2)], 0, NEUTRAL - 4)
        assert policy.victims(3, lambda _: False) == [a_key(number) for number in (0, 2, 1)]
        assert policy.victims(2, {a_key(0)}.__contains__) == [a_key(2), a_key(1)]

    def test_a_chunk_of_less_value_than_the_victim_is_not_admitted(self) -> None:
        policy = self.stored([NEUTRAL], NEUTRAL - 1)
        assert self.victims(policy, 1) == []
        policy = self.stored([NEUTRAL], NEUTRAL)
        assert self.victims(policy, 1) == [a_key(0)]

    def test_a_later_lookup_changes_the_value(self) -> None:
        policy = self.stored([NEUTRAL, NEUTRAL], 15)
        policy.used([a_key(0)], 0, NEUTRAL)
        policy.used([a_key(1)], 0, 0)
        assert self.victims(policy, 1) == [a_key(1)]

    def found(self, values: tuple[int, int]) -> int:
        """Each second, ask for a chunk of one byte and for one of four, each every 40 s."""
        clock, here, found = Clock(), set[int](), 0
        policy = LearnedPolicy(clock)
        for second in range(3000):
            clock.now_s = float(second)
            for number, nbytes, value in (
                (second % 40, 1, values[0]),
                (100 + second % 40, 4, values[1]),
            ):
                key = a_key(number)
                prompt = policy.looked_up([key], int(number in here))
                if number in here:
                    policy.used([key], prompt, value)
                    policy.touch(key)
                    found += second >= 2000
                    continue
                policy.missed([key], prompt, value)
                missing = policy.nbytes() + nbytes - 80
                if missing > 0:
                    victims = policy.victims(missing, lambda _: False, None, key)
                    if not victims:
                        continue
                    for victim in victims:
                        policy.remove(victim, evicted=True)
                        here.remove(int.from_bytes(victim[NAMESPACE_BYTES:][:HASH_BYTES], "big"))
                policy.insert(key, nbytes)
                here.add(number)
        return found

    def test_with_values_more_is_found_in_as_many_bytes(self) -> None:
        """All small chunks and 10 of the 40 large ones fit: 1,250 of 2,000."""
        assert self.found((NEUTRAL + 4, NEUTRAL)) > 1150 > self.found((NEUTRAL, NEUTRAL))

    def test_an_evicted_chunk_keeps_its_value(self) -> None:
        policy = self.stored([3], 15)
        policy.remove(a_key(0), evicted=True)
        policy.insert(a_key(0), 1)
        policy.missed([a_key(1)], 0, 4)
        policy.insert(a_key(1), 1)
        policy.used([a_key(1)], 0, 4)
        assert self.victims(policy, 1) == [a_key(0)]


@pytest.mark.parametrize("name", GENERATORS)
def test_on_generated_traffic_it_finds_as_much_as_lru(name: str) -> None:
    cut = a_cut(name, minutes=3.0)
    for capacity in (cut.num_ids // 16, cut.num_ids // 4):
        found = {
            make: int(
                replay_class(
                    cut.chunks,
                    cut.starts,
                    cut.parents,
                    make=make,
                    capacity=capacity,
                    times_s=cut.times_s,
                ).found.sum()
            )
            for make in (LearnedPolicy, LruPolicy)
        }
        assert found[LearnedPolicy] >= 0.97 * found[LruPolicy]


def test_a_trace_without_times_is_refused() -> None:
    cut = a_cut("shifting", minutes=0.2)
    with pytest.raises(ConfigError, match="timestamp"):
        replay_class(cut.chunks, cut.starts, cut.parents, make=LearnedPolicy, capacity=9)


def a_cut(name: str, *, minutes: float) -> Cut:
    return trace_of(generate(name, minutes=minutes), name=name).cut(512)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[number of times that a worth was asked for]"""
    calls, worth_of = [0], LearnedPolicy.worth_of

    def counted(policy: LearnedPolicy, place: Place) -> float:
        calls[0] += 1
        return worth_of(policy, place)

    monkeypatch.setattr(LearnedPolicy, "worth_of", counted)
    return calls


def test_a_victim_costs_as_much_after_many_others_of_the_same_moment(calls: list[int]) -> None:
    memory = Memory(64)
    for number in range(64):
        memory.ask([number])
    calls[0] = 0
    for number in range(64, 2064):
        memory.ask([number])
    assert calls[0] < 5 * 2000


class TestManyQueues:
    """Chunks of 640 kinds and values."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def policy(self, clock: Clock) -> LearnedPolicy:
        policy = LearnedPolicy(clock)
        for number in range(640):
            policy.insert(a_key(number), 1)
            policy.used([a_key(number)], number % 40, number // 40)
        return policy

    def test_no_search_for_a_victim_looks_at_most_of_them(
        self, policy: LearnedPolicy, clock: Clock, calls: list[int]
    ) -> None:
        for _ in range(100):
            clock.now_s += 1.0
            before = calls[0]
            [victim] = policy.victims(1, lambda _: False)
            assert calls[0] - before < 320
            policy.remove(victim, evicted=True)

    def test_all_of_them_are_found(self, policy: LearnedPolicy) -> None:
        assert len(policy.victims(640, lambda _: False)) == 640
        last = a_key(637)
        assert policy.victims(1, lambda key: key != last) == [last]

    def test_a_chunk_leaves_no_empty_queue(self) -> None:
        policy = LearnedPolicy(Clock())
        for number in range(2):
            policy.insert(a_key(number), 1)
        for number in range(640):
            policy.used([a_key(0)], number % 40, number // 40)
        for space in (policy._all, *policy._spaces.values()):
            assert len(space.queues) == 2
        policy.remove(a_key(0), evicted=True)
        for space in (policy._all, *policy._spaces.values()):
            assert len(space.queues) == 1
