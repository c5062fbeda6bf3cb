"""The disk's order of eviction with `policy = "learned"`."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, place_suffix
from kvhold.tiers.disk.folder import FoundValue, value_name
from kvhold.tiers.disk.index import Index
from kvhold.tiers.disk.learned import UNKNOWN_PAST, KnownPast, LearnedOrder, Learning
from kvhold.tiers.disk.rows import NONE, Rows
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.base import NEUTRAL
from kvhold.tiers.policies.ghosts import MOST_KINDS, TICK_S, age_s_of, queue_of
from kvhold.tiers.policies.kinds import USES, kind_of, pasts_of_use
from tests.tiers.learnt import Clock, teach

BLOCK = 4096
BACK, GONE = 6, 12  # numbers of prompts: new chunks after a short pause, and after a longer one


def a_key(number: int, group: int = 0) -> bytes:
    return b"a" * NAMESPACE_BYTES + number.to_bytes(HASH_BYTES, "big") + place_suffix(group, 0)


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [a_key(number) for number in numbers]


class Disk:
    """An index of so many values, beside a policy that has learnt: chunks of prompts BACK come back
    after a minute, those of GONE never.
    """

    def __init__(self, most: int, *, learnt: bool = True) -> None:
        self.clock = Clock()
        self.policy = LearnedPolicy(self.clock)
        learning = Learning()
        learning.worths = self.policy.times.add_place()
        if learnt:
            teach(self.policy, self.clock, back=kind_of(1, BACK), gone=kind_of(1, GONE))
        self.index = Index("learned", most * BLOCK, BLOCK, learning)
        self._written_ns = 0

    def pass_s(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.policy.times.advance(self.clock.now_s)

    def use(self, keys: Sequence[bytes], prompt: int, value: int = NEUTRAL) -> None:
        self.policy.times.use_factor(value)
        self.index.used(keys[::-1], prompt, value, self.policy.times.now_s, are_whole=True)

    def write(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the victims."""
        victims: list[bytes] = []
        for key in keys:
            self._written_ns += 1
            planned = self.index.reserve(key, self._written_ns, BLOCK)
            assert planned is not None
            for victim in planned.victims:
                self.index.finish(victim)
                victims.append(victim.key)
            self.index.commit(planned.entry, BLOCK)
        return victims

    def evict(self, num: int) -> list[bytes]:
        victims = self.index.evict(num * BLOCK)
        assert victims is not None
        for victim in victims:
            self.index.finish(victim)
        return [victim.key for victim in victims]


def test_what_comes_back_stays_and_what_does_not_goes() -> None:
    disk, back, gone = Disk(8), keys_of(range(4)), keys_of(range(4, 8))
    for keys, prompt in ((back, BACK), (gone, GONE)):
        disk.use(keys, prompt)
        disk.write(keys)
    assert set(disk.evict(4)) == set(gone)
    assert set(disk.evict(4)) == set(back)


def test_a_chunk_that_is_overdue_goes_before_one_that_is_not() -> None:
    disk, before, after = Disk(4), keys_of(range(2)), keys_of(range(2, 4))
    disk.use(before, BACK)
    disk.write(before)
    disk.pass_s(600.0)
    disk.use(after, BACK)
    disk.write(after)
    assert set(disk.evict(2)) == set(before)


def test_a_chunk_that_saves_more_stays() -> None:
    disk, less, more = Disk(4), keys_of(range(2)), keys_of(range(2, 4))
    for keys, value in ((more, NEUTRAL + 4), (less, NEUTRAL)):
        disk.use(keys, BACK, value)
        disk.write(keys)
    assert set(disk.evict(2)) == set(less)


def test_the_last_chunk_of_a_prompt_goes_first() -> None:
    disk, keys = Disk(6), keys_of(range(6))
    disk.use(keys, BACK)
    disk.write(keys)
    assert disk.evict(2) == keys[:3:-1]
    disk.use(keys[:4], BACK)
    assert disk.evict(4) == keys[3::-1]


def test_a_value_that_is_read_is_passed_over_and_goes_first_after_that() -> None:
    disk, keys = Disk(4), keys_of(range(4))
    disk.use(keys, BACK)
    disk.write(keys)
    first = disk.index.find(keys[3])
    assert first is not None
    disk.index.hold(first)
    assert disk.evict(2) == [keys[2], keys[1]]
    disk.index.unread(first)
    assert disk.evict(2) == [keys[3], keys[0]]


def test_a_lookup_counts_for_all_groups_of_a_chunk() -> None:
    disk = Disk(4)
    disk.use([a_key(1, group) for group in range(2)], BACK)
    disk.use([a_key(2, group) for group in range(2)], GONE)
    for number in (1, 2):
        disk.write([a_key(number, group) for group in range(2)])
    assert set(disk.evict(2)) == {a_key(2, group) for group in range(2)}


def test_uses_are_counted_on_the_disk_and_beyond() -> None:
    disk, key = Disk(1), a_key(1)
    disk.use([key], BACK)  # it is nowhere yet
    disk.write([key])
    disk.use([key], BACK)
    assert kind_on(disk, key) == kind_of(2, BACK)
    assert disk.write([a_key(2)]) == [key]
    disk.use([key], BACK)
    disk.use([key], BACK)
    disk.write([key])
    assert kind_on(disk, key) == kind_of(4, BACK)
    for _ in range(200):
        disk.use([key], BACK)
    assert 16 <= disk.index._rows.past(disk.index._rows.find(key)) & 31 <= 31
    assert kind_on(disk, key) <= kind_of(1 << USES, BACK)


def test_a_value_keeps_its_uses_when_it_is_replaced() -> None:
    disk, key = Disk(2), a_key(1)
    disk.use([key], BACK)
    disk.write([key])
    disk.use([key], BACK)
    old = disk.index.find(key)
    assert old is not None
    disk.index.hold(old)
    planned = disk.index.reserve(key, 99, BLOCK, beside=old)
    assert planned is not None
    disk.index.unread(old)
    disk.index.swap(old, planned.entry, BLOCK)
    disk.index.finish(old)
    assert kind_on(disk, key) == kind_of(2, BACK)


def kind_on(disk: Disk, key: bytes) -> int:
    rows = disk.index._rows
    return queue_of(rows.past(rows.find(key))) % MOST_KINDS


def test_after_a_restart_values_go_in_order_of_their_last_read_until_they_are_looked_up() -> None:
    disk = Disk(8, learnt=False)
    disk.index.add_found(
        [
            FoundValue(key, value_name(key, 1, n), 1, BLOCK, n + 1, 100 - n)
            for n, key in enumerate(keys_of(range(8)))
        ]
    )
    disk.index.sort()
    disk.pass_s(60.0)
    disk.use(keys_of([6, 7]), BACK)
    read = disk.index.find(a_key(5))
    assert read is not None
    disk.index.read(read, 200)
    disk.index.unread(read)
    assert disk.evict(8) == keys_of([4, 3, 2, 1, 0, 5, 7, 6])


def test_values_that_were_looked_up_while_others_are_sorted_stay_last() -> None:
    disk = Disk(8, learnt=False)
    disk.index.add_found(
        [
            FoundValue(key, value_name(key, 1, n), 1, BLOCK, n + 1, 100 - n)
            for n, key in enumerate(keys_of(range(4)))
        ]
    )
    sorting = disk.index.sorting()
    for _ in sorting.look():
        pass
    disk.pass_s(60.0)
    disk.use(keys_of([3]), BACK)
    sorting.sort()
    for _ in sorting.link():
        pass
    assert disk.evict(4) == keys_of([2, 1, 0, 3])


def test_values_that_nobody_uses_go_first_however_long_the_node_runs() -> None:
    disk = Disk(4, learnt=False)
    disk.write(keys_of(range(2)))
    disk.pass_s((1 << 22) * TICK_S - 1000.0)  # ticks of pasts begin again after that
    disk.use(keys_of([2]), BACK)
    disk.write(keys_of([2]))
    disk.pass_s(1001.0)
    assert disk.evict(2) == keys_of([0, 1])


def test_evicted_chunks_set_the_price_of_the_disk() -> None:
    disk = Disk(4)
    disk.use(keys_of(range(4)), BACK)
    disk.write(keys_of(range(4)))
    worths = disk.index._learned._learning.worths  # type: ignore[union-attr]
    assert worths is not None and worths.price == 0.0
    disk.evict(4)
    for _ in range(100):
        disk.pass_s(0.5)
    assert worths.price > 0.0


steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "write", "evict", "delete", "pass", "read"]),
        st.integers(0, 30),
        st.integers(1, 4),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(steps)
def test_the_victim_is_the_first_row_of_least_worth(steps: list[tuple[str, int, int]]) -> None:
    disk = Disk(12, learnt=False)
    times = disk.policy.times
    for what, number, num in steps:
        keys = keys_of(range(number, number + num))
        match what:
            case "use":
                disk.use(keys, number % 25, NEUTRAL + number % 3)
                times.use(kind_of(1, number % 25), num)
            case "write":
                disk.write([key for key in keys if disk.index.find(key) is None])
            case "evict" if len(disk.index):
                expected = least_worth(disk)
                assert disk.evict(1)[0] in expected
            case "delete":
                for key in keys:
                    if (entry := disk.index.find(key)) is not None:
                        disk.index.take(entry)
                        disk.index.finish(entry)
            case "pass":
                disk.pass_s(float(number * num))
            case "read" if (entry := disk.index.find(keys[0])) is not None:
                disk.index.read(entry, 1)
                disk.index.unread(entry)
    left = len(disk.index)
    assert left == 0 or len(set(disk.evict(left))) == left


def least_worth(disk: Disk) -> set[bytes]:
    """Return the first rows of the lists whose first row is worth least."""
    rows, worths = disk.index._rows, disk.index._learned._learning.worths  # type: ignore[union-attr]
    assert worths is not None
    found: dict[bytes, float] = {}
    for number in rows.lists():
        value, kind = divmod(number, MOST_KINDS)
        past = rows.past(rows.first(number))
        age_s = worths.now_s if past == UNKNOWN_PAST else age_s_of(past, worths.now_s)
        found[rows.key(rows.first(number))] = worths.worth(kind, age_s, value)
    return {key for key, worth in found.items() if worth == min(found.values())}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "touch", "past", "sort"]),
            st.integers(0, 20),
            st.integers(0, 3),
        ),
        max_size=100,
    )
)
def test_rows_with_a_past_are_in_a_list_for_each_kind(steps: list[tuple[str, int, int]]) -> None:
    rows = Rows(UNKNOWN_PAST)
    lists: dict[int, list[bytes]] = {}
    pasts = [UNKNOWN_PAST, *(pasts_of_use(prompt, NEUTRAL, 8.0)[0] for prompt in (1, 2, 3))]
    for clock, (what, number, which) in enumerate(steps):
        key, past = a_key(number), pasts[which]
        row = rows.find(key)
        if what == "sort":
            rows.sort()  # of the first list, which is in order of use anyway
        elif what == "add" and row == NONE:
            rows.add(key, nbytes=1, occupied_bytes=1, written_ns=0, used_ns=clock, past=past)
            lists.setdefault(queue_of(past), []).append(key)
        elif row != NONE:
            before = lists[rows.list_of(row)]
            before.remove(key)
            if what == "remove":
                rows.remove(row)
            elif what == "past" and which:
                rows.set_past(row, past)
                lists.setdefault(queue_of(past), []).append(key)
            else:
                rows.touch(row, clock)
                before.append(key)
        assert {number: keys for number, keys in lists.items() if keys} == {
            number: keys_in(rows, number) for number in rows.lists()
        }
        assert [rows.key(row) for row in rows.oldest()] == [
            key for number in rows.lists() for key in lists[number]
        ]
        assert sorted(rows.newest()) == sorted(rows.oldest())


def keys_in(rows: Rows, number: int) -> list[bytes]:
    row, keys = rows.first(number), []
    while row != NONE:
        keys.append(rows.key(row))
        row = rows.after(row)
    return keys


def test_the_first_rows_are_compared_again_only_where_they_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With so many lists that comparing all of them for each victim would take long."""
    disk = Disk(175, learnt=False)
    for prompt in range(25):
        for uses in range(7):
            keys = keys_of([prompt * 7 + uses])
            for _ in range(1 << uses):
                disk.use(keys, prompt)
            disk.write(keys)
    calls, push = [0], LearnedOrder._push

    def counted(order: LearnedOrder, number: int, row: int) -> None:
        calls[0] += 1
        push(order, number, row)

    disk.evict(1)
    monkeypatch.setattr(LearnedOrder, "_push", counted)
    for _ in range(50):
        disk.evict(1)
    assert calls[0] <= 50 * 4


def test_the_worth_of_chunks_of_one_past_is_computed_once_in_a_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, keys = Disk(60), keys_of(range(60))
    disk.use(keys, BACK)
    disk.write(keys)
    calls, know = [0], LearnedOrder._know

    def counted(order: LearnedOrder, past: int) -> KnownPast:
        calls[0] += 1
        return know(order, past)

    monkeypatch.setattr(LearnedOrder, "_know", counted)
    for _ in range(2):
        for _ in range(20):
            disk.evict(1)
        disk.pass_s(1.0)
    assert calls[0] == 2


def test_the_worths_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhold.tiers.disk.learned._MOST_KNOWN", 3)
    disk = Disk(20, learnt=False)
    for number in range(20):
        disk.use(keys_of([number]), number)
        disk.write(keys_of([number]))
    assert len(set(disk.evict(20))) == 20
    assert len(disk.index._learned._known) <= 3  # type: ignore[union-attr]


def test_a_chunk_that_is_worth_less_than_what_it_would_evict_is_not_admitted() -> None:
    disk, back, gone, unknown = Disk(4), keys_of(range(4)), a_key(4), a_key(5)
    disk.use([gone], GONE)
    assert disk.index.admits(gone, BLOCK), "there is room"
    disk.use(back, BACK)
    disk.write(back)
    disk.use([a_key(6)], BACK)
    assert disk.index.admits(a_key(6), BLOCK), "it is worth as much"
    assert not disk.index.admits(gone, BLOCK)
    assert disk.index.admits(unknown, BLOCK), "it was not looked up"
    disk.pass_s(600.0)
    disk.use([gone], GONE)
    assert disk.index.admits(gone, BLOCK), "the others are overdue"


def test_values_that_do_not_pay_go_by_age_and_new_ones_that_do_not_are_declined() -> None:
    disk, older, newer = Disk(4), keys_of(range(2)), keys_of(range(2, 4))
    worths = disk.index._learned._learning.worths  # type: ignore[union-attr]
    assert worths is not None
    for _ in range(500):
        worths.sell(10.0)  # a price that nothing pays
        disk.pass_s(0.5)
    disk.use(older, BACK)
    disk.write(older)
    disk.pass_s(4.0)
    disk.use(newer, GONE)
    disk.write(newer)
    assert worths.worth(kind_of(1, GONE), 0.0, NEUTRAL) < 0.0
    disk.use([a_key(4)], GONE)
    assert not disk.index.admits(a_key(4), BLOCK)
    assert set(disk.evict(2)) == set(older)


def test_chunks_that_are_not_admitted_set_the_price_too() -> None:
    disk = Disk(1)
    disk.use([a_key(1)], BACK)
    disk.write([a_key(1)])
    disk.use([a_key(2)], GONE)
    worths = disk.index._learned._learning.worths  # type: ignore[union-attr]
    assert worths is not None
    sold = worths._sold
    assert not disk.index.admits(a_key(2), BLOCK)
    assert worths._sold[1] == sold[1] + 1
