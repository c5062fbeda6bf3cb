"""The learned policy: what it evicts, and what it does not admit."""

from collections.abc import Iterable, Sequence

import pytest

from kvhold.core.errors import ConfigError
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, NAMESPACE_BYTES, place_suffix
from kvhold.testing.policy import PolicyContract
from kvhold.tiers.policies import LearnedPolicy, LruPolicy
from kvhold.tiers.policies.base import NEUTRAL, PolicyLookup
from kvhold.tiers.policies.chains import Place
from kvhold.tiers.policies.ghosts import MOST_KINDS, SAMPLE, Ghost, pack, queue_of, unpack
from kvhold_lab.simulate.generators import GENERATORS, generate
from kvhold_lab.simulate.policy_replay import replay_class
from kvhold_lab.simulate.trace import Cut, trace_of
from tests.tiers.learnt import Clock, a_key, samples, teach


class TestContract(PolicyContract):
    def make_policy(self) -> LearnedPolicy:
        return LearnedPolicy(Clock())


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

    @pytest.mark.parametrize("num_here", [0, 20, 60])
    def test_one_chunk_of_each_run_is_counted(self, num_here: int) -> None:
        """First 60 new chunks, then the same and 40 new ones: two runs, or three if some are here.

        The chunks in memory are a run, and so are those that are not.
        """
        memory = Memory(60)
        times = memory.policy.times
        memory.ask(range(60))
        assert samples(memory.policy).total() == 1
        for number in range(59, num_here - 1, -1):
            memory.policy.remove(a_key(number), evicted=True)
        assert samples(memory.policy).total() == 1
        memory.clock.now_s = 60.0
        keys = [a_key(number) for number in range(100)]
        prompt = memory.policy.looked_up(keys, num_here)
        memory.policy.used(keys[:num_here], prompt)
        memory.policy.missed(keys[num_here:], prompt)
        assert samples(memory.policy).total() == 2 + (num_here == 20)
        assert times._ended.sum() == 1, "one interval was counted, so one has ended"

    def test_of_groups_and_shards_one_chunk_is_counted(self) -> None:
        policy = LearnedPolicy(Clock())
        names = [a_key(number)[:NAME_BYTES] for number in range(20)]
        keys = [name + place_suffix(0, shard) for name in names for shard in (1, 0)]
        policy.missed(keys[1::2], policy.looked_up(keys[1::2], 0))
        for key in keys:
            policy.insert(key, 1)
        policy.used(keys, PolicyLookup())
        assert samples(policy).total() == 1
        for key in keys:
            policy.remove(key, evicted=True)
        assert samples(policy).total() == 1
        assert [bool(policy.ghosts.find(name) & SAMPLE) for name in names] == [True] + 19 * [False]
        for key in keys:
            policy.insert(key, 1)
        assert samples(policy).total() == 1

    @pytest.mark.parametrize("size", [1, 7, 60])
    def test_a_run_goes_on_over_the_calls_of_a_lookup_and_of_a_store(self, size: int) -> None:
        clock = Clock()
        policy, keys = LearnedPolicy(clock), [a_key(number) for number in range(60)]
        parts = [keys[first : first + size] for first in range(0, 60, size)]
        for at_s in (0.0, 200.0):
            clock.now_s = at_s
            lookup = policy.looked_up(keys, 0)
            for part in parts:
                clock.now_s += 1.0
                policy.missed(part, lookup)
            assert samples(policy).total() == 1
        for part in parts:
            clock.now_s += 1.0
            for key in part:
                policy.insert(key, 1)
        for at_s in (400.0, 600.0):
            clock.now_s = at_s
            lookup = policy.looked_up(keys, 60)
            for part in parts:
                clock.now_s += 1.0
                policy.used(part, lookup)
            assert samples(policy).total() == 1

    def test_a_run_that_is_evicted_over_a_long_time_is_still_one(self) -> None:
        """The times of its use and of an earlier one are merged meanwhile."""
        clock = Clock()
        policy, keys = LearnedPolicy(clock), [a_key(number) for number in range(60)]
        policy.missed([a_key(99)], policy.looked_up([a_key(99)], 0))
        clock.now_s = 3.0
        policy.missed(keys, policy.looked_up(keys, 0))
        for key in keys:
            policy.insert(key, 1)
        for key in reversed(keys):
            clock.now_s += 30.0
            policy.looked_up([], 0)
            policy.remove(key, evicted=True)
        policy.missed(keys, policy.looked_up(keys, 0))
        assert samples(policy).total() == 2, "with that of the other prompt"

    def test_chunks_that_other_lookups_use_in_between_are_counted_once_for_each(self) -> None:
        clock = Clock()
        policy, keys = LearnedPolicy(clock), [a_key(number) for number in range(60)]
        for key in keys:
            policy.insert(key, 1)
        first, second = policy.looked_up(keys, 60), policy.looked_up(keys[:30], 30)
        for at in range(0, 60, 10):
            clock.now_s += 1.0
            policy.used(keys[at : at + 10], first)
            policy.used(keys[at : min(at + 10, 30)], second)
        assert samples(policy).total() == 1, "the first chunk is the sample of both"
        policy.used(keys, policy.looked_up(keys, 60))
        assert samples(policy).total() == 2, "30 chunks were used twice, the others once"

    def test_repeats_in_other_groups_are_not_counted_even_if_they_missed_a_lookup(self) -> None:
        policy = LearnedPolicy(Clock())
        keys = [a_key(number) for number in range(20)]
        others = [key[:NAME_BYTES] + place_suffix(1, 0) for key in keys]
        policy.missed(keys, policy.looked_up(keys, 0))
        for key in (*keys, *others):
            policy.insert(key, 1)
        policy.used(keys, policy.looked_up(keys, 20))
        lookup = policy.looked_up(keys, 20)
        policy.used(keys, lookup)
        policy.used(others, lookup, is_repeat=True)
        assert samples(policy).total() == 1

    def test_the_sample_is_in_the_group_and_shard_that_lookups_name(self) -> None:
        policy = LearnedPolicy(Clock())
        keys, others = (
            [a_key(number)[:NAME_BYTES] + place_suffix(group, 2) for number in range(20)]
            for group in (1, 0)
        )
        policy.missed(keys, policy.looked_up(keys, 0))
        for key in (*others, *keys):
            policy.insert(key, 1)
        assert policy.ghosts.num == 0
        chunks = [policy._chunks.get(key) for key in (*keys, *others)]
        assert [chunk.is_sample for chunk in chunks if chunk] == [True] + 39 * [False]

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
        policy.used([*self.keys(0, 0), *self.keys(0, 1)], PolicyLookup(9), 5)
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
        policy.used([a_key(2)], PolicyLookup(), NEUTRAL - 4)
        assert policy.victims(3, lambda _: False) == [a_key(number) for number in (0, 2, 1)]
        assert policy.victims(2, {a_key(0)}.__contains__) == [a_key(2), a_key(1)]

    def test_a_chunk_of_less_value_than_the_victim_is_not_admitted(self) -> None:
        policy = self.stored([NEUTRAL], NEUTRAL - 1)
        assert self.victims(policy, 1) == []
        policy = self.stored([NEUTRAL], NEUTRAL)
        assert self.victims(policy, 1) == [a_key(0)]

    def test_a_later_lookup_changes_the_value(self) -> None:
        policy = self.stored([NEUTRAL, NEUTRAL], 15)
        policy.used([a_key(0)], PolicyLookup(), NEUTRAL)
        policy.used([a_key(1)], PolicyLookup(), 0)
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
        policy.missed([a_key(1)], PolicyLookup(), 4)
        policy.insert(a_key(1), 1)
        policy.used([a_key(1)], PolicyLookup(), 4)
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
    """Chunks of 400 kinds and values."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def policy(self, clock: Clock) -> LearnedPolicy:
        policy = LearnedPolicy(clock)
        for number in range(400):
            policy.insert(a_key(number), 1)
            policy.used([a_key(number)], PolicyLookup(number % 25), number // 25)
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
        assert len(policy.victims(400, lambda _: False)) == 400
        last = a_key(397)
        assert policy.victims(1, lambda key: key != last) == [last]

    def test_a_chunk_leaves_no_empty_queue(self) -> None:
        policy = LearnedPolicy(Clock())
        for number in range(2):
            policy.insert(a_key(number), 1)
        for number in range(400):
            policy.used([a_key(0)], PolicyLookup(number % 25), number // 25)
        for space in (policy._all, *policy._spaces.values()):
            assert len(space.queues) == 2
        policy.remove(a_key(0), evicted=True)
        for space in (policy._all, *policy._spaces.values()):
            assert len(space.queues) == 1
