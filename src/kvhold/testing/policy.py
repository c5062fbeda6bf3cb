"""The contract of eviction policies as one test suite.

    class TestMyPolicy(PolicyContract):
        def make_policy(self) -> Policy:
            return MyPolicy()

With `rank`, the order of eviction is compared with a slow model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.tiers.policies.base import EndOfSearch, Policy


@dataclass
class Known:
    """Times are step numbers. An insert is a step, but not a use."""

    key: bytes
    nbytes: int
    parent: bytes | None
    inserted_at: int
    touched_at: int
    uses: int = 0
    demoted: bool = False


def make_chunk(number: int, space: str = "a") -> bytes:
    return space.encode() * NAMESPACE_BYTES + number.to_bytes(KEY_BYTES - NAMESPACE_BYTES, "big")


_KEYS = tuple(make_chunk(number) for number in range(12))
_A, _B = _KEYS[0][:NAMESPACE_BYTES], make_chunk(0, "b")[:NAMESPACE_BYTES]


class PolicyContract(ABC):
    """Override `make_policy`."""

    @abstractmethod
    def make_policy(self) -> Policy: ...

    def rank(self, known: Known) -> Any:
        """The lowest unique rank is evicted first. None: the order is not checked."""
        return None

    def test_a_new_policy_knows_nothing_and_has_no_victims(self) -> None:
        policy = self.make_policy()
        assert (len(policy), policy.nbytes(), policy.nbytes(_A)) == (0, 0, 0)
        for namespace in (None, _A):
            assert (
                policy.victims(1, unpinned, namespace)
                == policy.victims(0, unpinned, namespace)
                == []
            )

    def test_every_inserted_key_can_be_evicted(self) -> None:
        policy = self.filled(5)
        assert len(policy) == 5
        assert sorted(policy.victims(50, unpinned)) == sorted(_KEYS[:5])

    def test_what_was_not_asked_for_is_not_evicted(self) -> None:
        assert self.filled(5).victims(0, unpinned) == []

    def test_victims_free_at_least_what_was_asked_and_no_more_go_than_that_takes(self) -> None:
        policy = self.filled(5)
        assert [len(policy.victims(nbytes, unpinned)) for nbytes in range(1, 51)] == [
            -(-nbytes // 10) for nbytes in range(1, 51)
        ]

    def test_more_than_there_is_has_no_victims_rather_than_too_few(self) -> None:
        assert self.filled(5).victims(51, unpinned) == []

    def test_a_pinned_key_is_never_a_victim(self) -> None:
        policy = self.filled(5)
        pinned = {_KEYS[0], _KEYS[3]}
        assert sorted(policy.victims(30, pinned.__contains__)) == [_KEYS[1], _KEYS[2], _KEYS[4]]

    def test_pinned_keys_do_not_count_as_room(self) -> None:
        policy = self.filled(5)
        assert policy.victims(31, {_KEYS[0], _KEYS[3]}.__contains__) == []
        assert policy.victims(1, lambda _: True) == []

    def test_a_key_is_a_victim_again_when_its_pins_have_fallen(self) -> None:
        policy = self.filled(3)
        assert policy.victims(1, lambda _: True) == []
        assert sorted(policy.victims(30, unpinned)) == sorted(_KEYS[:3])

    def test_victims_removes_nothing(self) -> None:
        policy = self.filled(5)
        for nbytes in (10, 50, 30, 50):
            assert policy.victims(nbytes, unpinned)
            assert (len(policy), policy.nbytes()) == (5, 50)
        assert sorted(policy.victims(50, unpinned)) == sorted(_KEYS[:5])

    def test_a_fault_while_asking_for_pins_loses_nothing(self) -> None:
        policy = self.chain(5)
        policy.insert(_KEYS[6], 10)
        asked: list[bytes] = []

        def faulty(key: bytes) -> bool:
            asked.append(key)
            if len(asked) == 3:
                raise LookupError(key)
            return False

        with pytest.raises(LookupError):
            policy.victims(60, faulty)
        assert sorted(policy.victims(60, unpinned)) == sorted([*_KEYS[:5], _KEYS[6]])

    def test_some_victims_are_those_or_fewer_and_a_search_may_end(self) -> None:
        policy = self.chain(4)
        policy.insert(_KEYS[6], 10)
        for nbytes in range(60):
            all_or_none = policy.victims(nbytes, unpinned)
            some = policy.some_victims(nbytes, unpinned)
            assert some == all_or_none or nbytes > 50
        assert sorted(some) == sorted([*_KEYS[:4], _KEYS[6]])
        assert policy.some_victims(60, {_KEYS[2]}.__contains__, _A) in (
            [_KEYS[3], _KEYS[6]],
            [_KEYS[6], _KEYS[3]],
        )
        assert policy.some_victims(1, unpinned, _B) == []
        asked: list[bytes] = []

        def ends(key: bytes) -> bool:
            asked.append(key)
            if len(asked) == 3:
                raise EndOfSearch
            return False

        some = policy.some_victims(60, ends)
        assert set(some) <= set(asked[:2])
        assert sorted(policy.victims(50, unpinned)) == sorted([*_KEYS[:4], _KEYS[6]])

    def test_touched_keys_go_in_the_end(self) -> None:
        policy = self.filled(5)
        for _ in range(100):
            for key in _KEYS[:5]:
                policy.touch(key)
        assert sorted(policy.victims(50, unpinned)) == sorted(_KEYS[:5])

    def test_keys_touched_together_are_as_if_touched_one_after_the_other(self) -> None:
        together, apart = self.chain(5), self.chain(5)
        asked = [_KEYS[3], _KEYS[0], _KEYS[7], _KEYS[3], _KEYS[1]]
        for policy in (together, apart):
            policy.insert(_KEYS[8], 10)
            policy.insert(_KEYS[9], 10)
        for keys in (asked, [_KEYS[9], _KEYS[8], _KEYS[9]], []):
            together.touch_all(iter(keys))
            for key in keys:
                apart.touch(key)
        assert len(together) == 7
        assert [together.victims(n, unpinned) for n in range(80)] == [
            apart.victims(n, unpinned) for n in range(80)
        ]

    def test_a_removed_key_is_forgotten(self) -> None:
        policy = self.filled(3)
        policy.remove(_KEYS[1])
        assert len(policy) == 2
        assert sorted(policy.victims(20, unpinned)) == [_KEYS[0], _KEYS[2]]
        assert policy.victims(21, unpinned) == []

    def test_unknown_keys_are_ignored(self) -> None:
        policy = self.filled(2)
        for key in (_KEYS[5], _KEYS[6]):
            policy.touch(key)
            policy.remove(key)
            policy.remove(key, evicted=True)
        policy.remove(_KEYS[0])
        policy.remove(_KEYS[0])
        policy.touch(_KEYS[0])
        assert len(policy) == 1
        assert policy.victims(10, unpinned) == [_KEYS[1]]

    def test_a_key_may_come_back_with_another_size(self) -> None:
        for evicted in (False, True):
            policy = self.filled(1)
            policy.remove(_KEYS[0], evicted=evicted)
            policy.insert(_KEYS[0], 70)
            assert (len(policy), policy.nbytes()) == (1, 70)
            assert policy.victims(70, unpinned) == [_KEYS[0]]
            assert policy.victims(71, unpinned) == []

    def test_a_known_key_inserted_again_is_neither_reset_nor_counted_twice(self) -> None:
        policy, same = self.filled(5), self.filled(5)
        for key in (_KEYS[2], _KEYS[2], _KEYS[0]):
            policy.touch(key)
            same.touch(key)
        for key in _KEYS[:5]:
            policy.insert(key, 99)
        assert (len(policy), policy.nbytes()) == (5, 50)
        assert [policy.victims(n, unpinned) for n in range(60)] == [
            same.victims(n, unpinned) for n in range(60)
        ]
        for key in _KEYS[:5]:
            policy.remove(key)
        assert (len(policy), policy.nbytes(), policy.victims(1, unpinned)) == (0, 0, [])

    @pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 1, 3)])
    def test_a_prefix_goes_after_its_continuation_whichever_came_first(
        self, order: tuple[int, ...]
    ) -> None:
        policy = self.chain(5, order)
        assert policy.victims(50, unpinned) == [*reversed(_KEYS[:5])]
        assert policy.victims(20, unpinned) == [_KEYS[4], _KEYS[3]]

    def test_a_prefix_asked_for_less_and_earlier_still_goes_after_its_continuation(self) -> None:
        policy = self.chain(3)
        for key in (_KEYS[2], _KEYS[2], _KEYS[1]):
            policy.touch(key)
        assert policy.victims(30, unpinned) == [_KEYS[2], _KEYS[1], _KEYS[0]]

    def test_a_pinned_continuation_keeps_its_whole_prefix(self) -> None:
        policy = self.chain(4)
        policy.insert(_KEYS[9], 10, _KEYS[1])
        policy.insert(_KEYS[10], 10)
        assert sorted(policy.victims(20, {_KEYS[3]}.__contains__)) == [_KEYS[9], _KEYS[10]]
        assert policy.victims(21, {_KEYS[3]}.__contains__) == []

    def test_a_pinned_prefix_keeps_no_continuation(self) -> None:
        policy = self.chain(3)
        assert policy.victims(10, set(_KEYS[:2]).__contains__) == [_KEYS[2]]
        assert policy.victims(11, set(_KEYS[:2]).__contains__) == []

    def test_where_prompts_part_both_branches_go_before_the_stem(self) -> None:
        policy = self.chain(3)
        policy.insert(_KEYS[9], 10, _KEYS[0])
        victims = policy.victims(40, unpinned)
        assert victims[-1] == _KEYS[0]
        assert victims.index(_KEYS[2]) < victims.index(_KEYS[1])
        assert sorted(victims) == sorted([*_KEYS[:3], _KEYS[9]])

    def test_what_follows_a_gap_stands_alone_until_the_gap_is_filled(self) -> None:
        policy = self.chain(3)
        policy.remove(_KEYS[1])
        assert sorted(
            policy.victims(20, {_KEYS[2]}.__contains__)
            or policy.victims(10, {_KEYS[2]}.__contains__)
        ) == [_KEYS[0]]
        policy.insert(_KEYS[1], 10, _KEYS[0])
        assert policy.victims(10, {_KEYS[2]}.__contains__) == []
        assert policy.victims(30, unpinned) == [_KEYS[2], _KEYS[1], _KEYS[0]]

    def test_a_parent_may_be_learnt_later(self) -> None:
        policy = self.filled(2)
        policy.insert(_KEYS[1], 10, _KEYS[0])
        assert policy.victims(20, unpinned) == [_KEYS[1], _KEYS[0]]
        policy.insert(_KEYS[1], 10)
        assert policy.victims(10, {_KEYS[1]}.__contains__) == []

    @pytest.mark.parametrize("length", [1, 2, 3, 5])
    def test_chunks_that_continue_one_another_in_a_ring_can_still_be_evicted(
        self, length: int
    ) -> None:
        for gone in (None, *range(length)):
            policy = self.make_policy()
            for i in range(length):
                policy.insert(_KEYS[i], 10, _KEYS[(i + 1) % length])
            if gone is not None:
                policy.remove(_KEYS[gone])
                policy.insert(_KEYS[gone], 10, _KEYS[(gone + 1) % length])
            policy.insert(_KEYS[length - 1], 10, _KEYS[0])
            assert sorted(policy.victims(10 * length, unpinned)) == sorted(_KEYS[:length])

    def test_a_chain_of_thousands_is_no_recursion(self) -> None:
        policy = self.make_policy()
        keys = [make_chunk(number) for number in range(5_000)]
        for key, parent in zip(keys, [None, *keys], strict=False):
            policy.insert(key, 1, parent)
        assert policy.victims(5_000, unpinned) == keys[::-1]
        policy.insert(keys[0], 1, keys[-1])
        assert policy.victims(5_000, unpinned) == keys[::-1]

    def test_a_namespace_gives_way_for_itself_alone(self) -> None:
        policy = self.chain(3)
        for number in range(3):
            policy.insert(
                make_chunk(number, "b"), 100, make_chunk(number - 1, "b") if number else None
            )
        assert policy.victims(25, unpinned, _A) == [_KEYS[2], _KEYS[1], _KEYS[0]]
        assert policy.victims(25, unpinned, _B) == [make_chunk(2, "b")]
        assert policy.victims(31, unpinned, _A) == []
        assert policy.victims(1, unpinned, b"c" * NAMESPACE_BYTES) == []
        assert len(policy.victims(330, unpinned)) == 6

    def test_bytes_are_counted_by_namespace(self) -> None:
        policy = self.chain(3)
        policy.insert(make_chunk(0, "b"), 100)
        assert (policy.nbytes(), policy.nbytes(_A), policy.nbytes(_B)) == (130, 30, 100)
        policy.remove(_KEYS[0])
        policy.remove(_KEYS[0])
        policy.remove(make_chunk(0, "b"), evicted=True)
        assert (policy.nbytes(), policy.nbytes(_A), policy.nbytes(_B)) == (20, 20, 0)

    def test_demoted_keys_go_first_until_they_are_used_again(self) -> None:
        policy = self.filled(5)
        for key in _KEYS[:5]:
            policy.touch(key)
        policy.demote([_KEYS[3], _KEYS[1], _KEYS[9]])
        assert set(policy.victims(20, unpinned)) == {_KEYS[1], _KEYS[3]}
        assert len(policy.victims(50, unpinned)) == 5
        assert policy.victims(10, {_KEYS[1]}.__contains__) == [_KEYS[3]]
        policy.touch(_KEYS[3])
        assert policy.victims(10, unpinned) == [_KEYS[1]]
        policy.remove(_KEYS[1], evicted=True)
        assert len(policy.victims(40, unpinned)) == 4

    def test_a_demoted_prefix_goes_after_its_continuation(self) -> None:
        policy = self.chain(3)
        policy.insert(_KEYS[4], 10)
        policy.demote([_KEYS[0], _KEYS[1]])
        victims = policy.victims(40, unpinned)
        assert [key for key in victims if key != _KEYS[4]] == [_KEYS[2], _KEYS[1], _KEYS[0]]
        policy.demote([_KEYS[2]])
        assert policy.victims(30, unpinned) == [_KEYS[2], _KEYS[1], _KEYS[0]]

    def test_thousands_of_touches_lose_no_key_and_no_order(self) -> None:
        policy, model, chance = self.make_policy(), _Model(), Random(1)
        keys = [make_chunk(number, chance.choice("ab")) for number in range(500)]
        for key in keys:
            policy.insert(key, 1)
            model.insert(key, 1, None)
        for key in chance.choices(keys, k=5_000):
            policy.touch(key)
            model.touch(key)
        victims = policy.victims(500, unpinned)
        assert sorted(victims) == sorted(keys)
        ranks = [self.rank(model.known[key]) for key in victims]
        assert ranks == [None] * 500 or ranks == sorted(ranks)

    def test_two_policies_share_nothing(self) -> None:
        self.filled(5)
        assert (len(self.make_policy()), self.make_policy().nbytes()) == (0, 0)

    def test_no_history_breaks_the_law(self) -> None:
        machine = cast(
            "type[RuleBasedStateMachine]", lambda: _History(self.make_policy(), self.rank)
        )
        run_state_machine_as_test(
            machine, settings=settings(deadline=None, max_examples=100, stateful_step_count=40)
        )

    def filled(self, count: int) -> Policy:
        policy = self.make_policy()
        for key in _KEYS[:count]:
            policy.insert(key, 10)
        return policy

    def chain(self, count: int, order: Collection[int] = ()) -> Policy:
        policy = self.make_policy()
        for i in order or range(count):
            policy.insert(_KEYS[i], 10, _KEYS[i - 1] if i else None)
        return policy


def unpinned(key: bytes) -> bool:
    return False


# chunk i continues chunk _BEFORE[i], in each of two namespaces
_BEFORE = (None, 0, 1, 2, 1, 4, 0, None, 7, 8)
_PARENTS = {
    make_chunk(number, space): None if before is None else make_chunk(before, space)
    for space in "ab"
    for number, before in enumerate(_BEFORE)
}

_keys = st.sampled_from([*_PARENTS])
_spaces = st.sampled_from([None, _A, _B])
_pins = st.one_of(st.just(frozenset[bytes]()), st.frozensets(_keys, max_size=8))


@dataclass
class _Model:
    known: dict[bytes, Known] = field(default_factory=dict)
    steps: int = 0

    def insert(self, key: bytes, nbytes: int, parent: bytes | None) -> None:
        self.steps += 1
        known = self.known.setdefault(key, Known(key, nbytes, None, self.steps, self.steps))
        known.parent = known.parent or parent

    def touch(self, key: bytes) -> None:
        self.steps += 1
        if (known := self.known.get(key)) is not None:
            known.uses += 1
            known.touched_at = self.steps
            known.demoted = False

    def demote(self, key: bytes) -> None:
        if (known := self.known.get(key)) is not None:
            known.demoted = True

    def leaves(
        self, gone: Collection[bytes], pinned: Collection[bytes], namespace: bytes | None
    ) -> Iterator[Known]:
        left = [known for key, known in self.known.items() if key not in gone]
        continued = {known.parent for known in left}
        for known in left:
            if (
                known.key not in continued
                and known.key not in pinned
                and known.key.startswith(namespace or b"")
            ):
                yield known

    def evictable_bytes(self, pinned: Collection[bytes], namespace: bytes | None) -> int:
        gone: set[bytes] = set()
        while some := {known.key for known in self.leaves(gone, pinned, namespace)}:
            gone |= some
        return sum(self.known[key].nbytes for key in gone)


class _History(RuleBasedStateMachine):
    def __init__(self, policy: Policy, rank: Callable[[Known], Any]) -> None:
        super().__init__()
        self.policy = policy
        self.rank = rank
        self.model = _Model()

    @initialize(keys=st.permutations([*_PARENTS]), count=st.integers(0, len(_PARENTS)))
    def begin(self, keys: list[bytes], count: int) -> None:
        for key in keys[:count]:
            self.insert(key, 10, knows_parent=True)

    @rule(key=_keys, nbytes=st.integers(1, 40), knows_parent=st.booleans())
    def insert(self, key: bytes, nbytes: int, knows_parent: bool) -> None:
        parent = _PARENTS[key] if knows_parent else None
        self.policy.insert(key, nbytes, parent)
        self.model.insert(key, nbytes, parent)

    @rule(keys=st.lists(_keys, max_size=5))
    def touch(self, keys: list[bytes]) -> None:
        for key in keys:
            self.policy.touch(key)
            self.model.touch(key)

    @rule(keys=st.lists(_keys, max_size=5))
    def touch_all(self, keys: list[bytes]) -> None:
        self.policy.touch_all(keys)
        for key in keys:
            self.model.touch(key)

    @rule(keys=st.lists(_keys, max_size=5))
    def demote(self, keys: list[bytes]) -> None:
        self.policy.demote(keys)
        for key in keys:
            self.model.demote(key)

    @rule(key=_keys, evicted=st.booleans())
    def remove(self, key: bytes, evicted: bool) -> None:
        self.policy.remove(key, evicted=evicted)
        self.model.known.pop(key, None)

    @rule(nbytes=st.integers(1, 200), pinned=_pins, namespace=_spaces)
    def evict(self, nbytes: int, pinned: frozenset[bytes], namespace: bytes | None) -> None:
        for victim in self.victims(nbytes, pinned, namespace):
            self.remove(victim, evicted=True)

    @rule(nbytes=st.integers(1, 200), pinned=_pins, namespace=_spaces)
    def ask(self, nbytes: int, pinned: frozenset[bytes], namespace: bytes | None) -> None:
        self.victims(nbytes, pinned, namespace)

    def victims(
        self, nbytes: int, pinned: frozenset[bytes], namespace: bytes | None
    ) -> list[bytes]:
        known = self.model.known
        victims = self.policy.victims(nbytes, self._asks_for_known_keys(pinned), namespace)
        assert set(victims) <= set(known), "only known chunks are evicted"
        for i, victim in enumerate(victims):
            candidates = {
                each.key: each for each in self.model.leaves(victims[:i], pinned, namespace)
            }
            assert victim in candidates, (
                "a victim is in the namespace, not pinned, not chosen before, and no remaining "
                "chunk continues it"
            )
            demoted = [each for each in candidates.values() if each.demoted]
            assert candidates[victim].demoted or not demoted, "demoted chunks go first"
            rank = self.rank(candidates[victim])
            assert rank is None or rank == min(map(self.rank, demoted or candidates.values())), (
                "the candidate with the lowest rank goes first"
            )
        if nbytes > self.model.evictable_bytes(pinned, namespace):
            assert victims == [], "all requested bytes, or none"
        else:
            assert (
                sum(known[key].nbytes for key in victims[:-1])
                < nbytes
                <= sum(known[key].nbytes for key in victims)
            )
        return victims

    @invariant()
    def all_is_counted(self) -> None:
        assert len(self.policy) == len(self.model.known)
        for namespace in (None, _A, _B):
            expected = sum(
                known.nbytes
                for key, known in self.model.known.items()
                if key.startswith(namespace or b"")
            )
            assert self.policy.nbytes(namespace) == expected

    def teardown(self) -> None:
        self.victims(max(1, self.policy.nbytes()), frozenset(), None)

    def _asks_for_known_keys(self, pinned: Collection[bytes]) -> Callable[[bytes], bool]:
        def is_pinned(key: bytes) -> bool:
            assert key in self.model.known, "a policy asks only for the pins of known chunks"
            return key in pinned

        return is_pinned
