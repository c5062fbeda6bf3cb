"""The learned policy: what it learns, what it evicts, and what it does not admit."""

from collections.abc import Iterable

import pytest

from kvhold.core.errors import ConfigError
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, NAMESPACE_BYTES, place_suffix
from kvhold.testing.policy import PolicyContract
from kvhold.tiers.policies import LearnedPolicy, LruPolicy
from kvhold.tiers.policies.ghosts import MOST_USES, Ghost, Ghosts
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

    def test_a_chunk_that_comes_back_is_worth_more_than_one_that_may_and_than_one_that_does_not(
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

    def test_what_is_still_awaited_counts_for_no_age_that_it_has_not_reached(self) -> None:
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

    def test_equal_calls_have_equal_results(self) -> None:
        first, second = self.learnt(), self.learnt()
        assert [first.worth_of_new(kind) for kind in range(3)] == [
            second.worth_of_new(kind) for kind in range(3)
        ]


class TestGhosts:
    def test_what_is_remembered_is_found_until_it_is_taken(self) -> None:
        ghosts = Ghosts()
        for number in range(1000):
            assert ghosts.add(a_key(number), Ghost(2.0 * number, number % 280, 3), 3000.0) is None
        assert ghosts.num == 1000
        for number in range(1000):
            expected = Ghost(2.0 * number, number % 280, 3)
            assert ghosts.find(a_key(number), 3000.0) == expected
            assert ghosts.take(a_key(number), 3000.0) == expected
            assert ghosts.find(a_key(number), 3000.0) is None
        assert ghosts.num == 0

    def test_the_oldest_of_a_full_set_is_replaced(self) -> None:
        ghosts = Ghosts(8)  # one set
        for number in range(8):
            ghosts.add(a_key(number), Ghost(10.0 * (number + 1), 1, 1), 100.0)
        assert ghosts.add(a_key(8), Ghost(100.0, 1, 1), 100.0) == Ghost(10.0, 1, 1)
        assert ghosts.find(a_key(0), 100.0) is None
        assert ghosts.num == 8

    def test_a_key_has_one_place(self) -> None:
        ghosts = Ghosts(8)
        ghosts.add(a_key(1), Ghost(4.0, 7, 2), 4.0)
        assert ghosts.add(a_key(1), Ghost(8.0, 9, 3), 8.0) == Ghost(4.0, 7, 2)
        assert ghosts.find(a_key(1), 8.0) == Ghost(8.0, 9, 3)
        assert ghosts.num == 1

    def test_times_are_right_after_a_year(self) -> None:
        ghosts, now_s = Ghosts(), 365 * DAY_S
        ghosts.add(a_key(1), Ghost(now_s - 90 * DAY_S, 1, 1), now_s)
        found = ghosts.find(a_key(1), now_s)
        assert found is not None
        assert found.at_s == pytest.approx(now_s - 90 * DAY_S, abs=2.0)

    def test_uses_are_counted_up_to_a_limit(self) -> None:
        ghosts = Ghosts()
        ghosts.add(a_key(1), Ghost(0.0, 1, 1000), 0.0)
        assert ghosts.take(a_key(1), 0.0) == Ghost(0.0, 1, MOST_USES)

    def test_eight_bytes_each(self) -> None:
        assert Ghosts(1 << 10).nbytes == 8 << 10


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

    def test_it_is_said_that_a_chunk_is_worth_less_than_what_it_would_evict(
        self, memory: Memory
    ) -> None:
        memory.ask([3])
        assert was_declined(memory.policy)
        assert memory.here == {a_key(1), a_key(2)}
        assert memory.policy.victims(1, lambda _: False) == [a_key(1)], "all are still candidates"
        assert not was_declined(memory.policy)

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
        memory.policy.ghosts.add(a_key(1)[:NAME_BYTES], Ghost(now_s, kind, 2), now_s)
        memory.clock.now_s += 40.0
        return memory

    def test_after_its_eviction(self, memory: Memory) -> None:
        at_once = memory.policy.expected_back_s(a_key(1), 0.0)
        assert at_once is not None
        assert 2.0 < at_once < 30.0
        memory.clock.now_s += 200.0
        later = memory.policy.expected_back_s(a_key(1), 200.0)
        assert later == pytest.approx(at_once, abs=2.0), "what was expected then counts"

    def test_nothing_is_said_of_a_chunk_that_is_here_or_was_never_seen_or_was_asked_for_since(
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
    return chunk.queue


@pytest.mark.parametrize("name", GENERATORS)
def test_on_made_traffic_it_finds_as_much_as_the_least_recently_used(name: str) -> None:
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
