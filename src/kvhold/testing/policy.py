"""What every eviction policy must do.

    class TestMyPolicy(PolicyContract):
        def make_policy(self) -> Policy:
            return MyPolicy()

Which chunk goes first is the policy's own affair and is tested beside it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhold.tiers.policies.base import Policy

_KEYS = tuple(bytes([i]) * 40 for i in range(12))

# Each step: what, which key, a number (of bytes where the step has some, else without meaning), and which keys are pinned meanwhile.
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "remove", "evict", "ask"]),
        st.sampled_from(_KEYS),
        st.integers(1, 40),
        st.frozensets(st.sampled_from(_KEYS)),
    ),
    max_size=60,
)


class PolicyContract:
    """Subclass it, name the subclass `Test...`, and say how a policy is made."""

    def make_policy(self) -> Policy:
        """A new policy that knows no key."""
        raise NotImplementedError("say how your policy is made")

    def test_a_new_policy_knows_nothing_and_has_no_victims(self) -> None:
        policy = self.make_policy()
        assert len(policy) == 0
        assert policy.victims(1, unpinned) == []

    def test_every_inserted_key_can_be_evicted(self) -> None:
        policy = self.filled(5)
        assert len(policy) == 5
        assert sorted(policy.victims(50, unpinned)) == sorted(_KEYS[:5])

    def test_what_was_not_asked_for_is_not_evicted(self) -> None:
        assert self.filled(5).victims(0, unpinned) == []

    def test_victims_free_at_least_what_was_asked(self) -> None:
        policy = self.filled(5)
        assert [len(policy.victims(nbytes, unpinned)) * 10 >= nbytes for nbytes in range(1, 51)] == [True] * 50

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
            assert len(policy) == 5
        assert sorted(policy.victims(50, unpinned)) == sorted(_KEYS[:5])

    def test_touched_keys_go_in_the_end(self) -> None:
        policy = self.filled(5)
        for _ in range(100):
            for key in _KEYS[:5]:
                policy.touch(key)
        assert sorted(policy.victims(50, unpinned)) == sorted(_KEYS[:5])

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
        policy.remove(_KEYS[0])
        policy.remove(_KEYS[0])
        policy.touch(_KEYS[0])
        assert len(policy) == 1
        assert policy.victims(10, unpinned) == [_KEYS[1]]

    def test_a_key_may_come_back_with_another_size(self) -> None:
        policy = self.filled(1)
        policy.remove(_KEYS[0])
        policy.insert(_KEYS[0], 70)
        assert len(policy) == 1
        assert policy.victims(70, unpinned) == [_KEYS[0]]
        assert policy.victims(71, unpinned) == []

    def test_two_policies_share_nothing(self) -> None:
        self.filled(5)
        assert len(self.make_policy()) == 0

    # The same test in several subclasses is the purpose of this class, so hypothesis is not to mind.
    @settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(steps=_STEPS)
    def test_no_history_breaks_the_law(self, steps: list[tuple[str, bytes, int, frozenset[bytes]]]) -> None:
        history = _History(self.make_policy())
        for what, key, nbytes, pinned in steps:
            history.step(what, key, nbytes, pinned)
        history.ask(sum(history.sizes.values()), frozenset())

    def filled(self, count: int) -> Policy:
        """A policy that knows `count` keys of 10 bytes each."""
        policy = self.make_policy()
        for key in _KEYS[:count]:
            policy.insert(key, 10)
        return policy


def unpinned(key: bytes) -> bool:
    """Nobody reads anything."""
    return False


@dataclass
class _History:
    """A policy, and beside it the plainest account of what it must know."""

    policy: Policy
    sizes: dict[bytes, int] = field(default_factory=dict)

    def step(self, what: str, key: bytes, nbytes: int, pinned: frozenset[bytes]) -> None:
        if what == "insert" and key not in self.sizes:
            self.policy.insert(key, nbytes)
            self.sizes[key] = nbytes
        elif what == "touch":
            self.policy.touch(key)
        elif what == "remove":
            self.remove(key)
        elif what == "ask":
            self.ask(nbytes, pinned)
        elif what == "evict":
            for victim in self.ask(nbytes, pinned):
                self.remove(victim)
        assert len(self.policy) == len(self.sizes)

    def remove(self, key: bytes) -> None:
        self.policy.remove(key)
        self.sizes.pop(key, None)

    def ask(self, nbytes: int, pinned: Collection[bytes]) -> list[bytes]:
        """The victims, found to be lawful."""
        victims = self.policy.victims(nbytes, self._asks_for_known_keys(pinned))
        assert len(set(victims)) == len(victims), "a key is evicted once"
        assert set(victims) <= set(self.sizes), "only what is here is evicted"
        assert set(victims).isdisjoint(pinned), "nothing pinned is evicted"
        evictable = sum(size for key, size in self.sizes.items() if key not in pinned)
        if nbytes > evictable:
            assert victims == [], "all that was asked, or nothing"
        else:
            assert sum(self.sizes[key] for key in victims) >= nbytes
        assert len(self.policy) == len(self.sizes), "asking removes nothing"
        return victims

    def _asks_for_known_keys(self, pinned: Collection[bytes]) -> Callable[[bytes], bool]:
        def is_pinned(key: bytes) -> bool:
            assert key in self.sizes, "a tier cannot say whether a chunk is pinned that is not there"
            return key in pinned

        return is_pinned
