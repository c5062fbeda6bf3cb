"""What a lookup of several hosts makes of their answers, said by the test."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvhold.core.errors import NodeLost
from kvhold.core.keys import HASH_BYTES, Namespace, Query
from kvhold.net import span as s
from kvhold.node.span import HostSpan
from kvhold.node.span.hosts import Host
from kvhold.testing.cache import HYBRID, a_prompt

SPACE = Namespace(model="model", layout=HYBRID, shards=2)


class Said:
    """A host that gives these answers, one after the other, and notes what is let go."""

    def __init__(self, shard: int, *answers: s.LookedUp | Exception) -> None:
        self.name, self.shards = f"host {shard}", (shard,)
        self.answers = list(answers)
        self.asked: list[int] = []  # whole chunks of each query
        self.let_gone: list[int] = []
        self.cleared_ns: list[int] = []

    def look_up(self, query: Query, **_: Any) -> Callable[[], s.LookedUp]:
        assert query.only == self.shards
        self.asked.append(len(query.hashes) // HASH_BYTES)
        return self._answer

    def look_again(self, ticket: int, **_: Any) -> Callable[[], s.LookedUp]:
        return self._answer

    def let_go(self, ticket: int) -> None:
        self.let_gone.append(ticket)

    def repeat_clear(self, namespace: bytes, at_ns: int, **_: Any) -> bool:
        self.cleared_ns.append(at_ns)
        return True

    def _answer(self) -> s.LookedUp:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def found(ticket: int, num_tokens: int, **changes: Any) -> s.LookedUp:
    given = {"sources": {"ram": num_tokens}, "reason": "never_stored"} | changes
    return s.LookedUp(ticket, num_tokens, **given)


def arriving(ticket: int, num_tokens: int = 0) -> s.LookedUp:
    return s.LookedUp(ticket, num_tokens, arriving=True)


NOTHING = s.LookedUp(reason="never_stored")
LOST = s.LookedUp(lost="away")


def looked_up(*hosts: Said) -> Any:
    return HostSpan(cast(tuple[Host, ...], hosts)).lookup(a_prompt(SPACE, 96), deadline_s=1.0)


def test_the_longer_hit_is_asked_again_and_let_go_after_the_answer() -> None:
    first, second = Said(0, found(1, 80), found(3, 48)), Said(1, found(2, 48))
    hit = looked_up(first, second)
    assert (hit.num_tokens, hit.tickets, hit.reason) == (48, (3, 2), "never_stored")
    assert (first.asked, first.let_gone, second.let_gone) == ([6, 3], [1], [])
    hit.close()
    assert (first.let_gone, second.let_gone) == ([1, 3], [2])


def test_hosts_that_never_agree_are_a_miss() -> None:
    lengths = range(96, 0, -8)
    first = Said(0, *(found(at, tokens) for at, tokens in enumerate(lengths[::2], 10)))
    second = Said(1, *(found(at, tokens) for at, tokens in enumerate(lengths[1::2], 20)))
    hit = looked_up(first, second)
    assert (hit.num_tokens, hit.ticket, hit.reason) == (0, 0, "incomplete")
    assert len(first.asked) + len(second.asked) == 6
    for host, start in ((first, 10), (second, 20)):
        assert sorted(host.let_gone) == [start + at for at in range(len(host.asked))]


def test_a_host_that_has_nothing_ends_the_wait_for_the_others() -> None:
    first, second = Said(0, arriving(1)), Said(1, NOTHING)
    hit = looked_up(first, second)
    assert (hit.arriving, hit.num_tokens, hit.reason) == (False, 0, "never_stored")
    assert first.let_gone == [1]
    third, fourth = Said(0, arriving(1), arriving(1, 32)), Said(1, arriving(2), NOTHING)
    hit = looked_up(third, fourth)
    assert hit.arriving
    hit.refresh()
    assert (hit.arriving, hit.num_tokens) == (False, 0)
    assert third.let_gone == [1]


def test_a_hit_arrives_when_it_has_arrived_on_all_hosts() -> None:
    first, second = Said(0, found(1, 96)), Said(1, arriving(2), arriving(2, 32), found(2, 96))
    hit = looked_up(first, second)
    hit.refresh()
    assert (hit.arriving, hit.num_tokens) == (True, 32)
    hit.settle()
    assert (hit.arriving, hit.num_tokens, hit.tickets) == (False, 96, (1, 2))
    hit.refresh()
    hit.close()
    hit.refresh()
    assert (first.let_gone, second.let_gone) == ([1], [2])


def test_the_slowest_source_counts() -> None:
    first = Said(0, found(1, 96, reason="whole"))
    second = Said(1, found(2, 96, sources={"ram": 32, "disk": 64}, reason="whole"))
    assert looked_up(first, second).sources == {"ram": 32, "disk": 64}


@pytest.mark.parametrize("begins", [LOST, arriving(2)])
def test_a_lost_host_is_a_miss_and_nothing_stays_pinned(begins: s.LookedUp) -> None:
    first, second = Said(0, found(1, 96)), Said(1, begins, LOST)
    hit = looked_up(first, second)
    if hit.arriving:
        hit.refresh()
    assert (hit.num_tokens, hit.ticket, hit.reason) == (0, 0, "host_away")
    assert first.let_gone == [1]
    assert second.let_gone == ([] if begins is LOST else [2])


def test_an_error_of_the_own_node_is_raised_and_nothing_stays_pinned() -> None:
    first, second = Said(0, found(1, 96)), Said(1, NodeLost("gone"))
    with pytest.raises(NodeLost):
        looked_up(first, second)
    assert first.let_gone == [1]
    third, fourth = Said(0, arriving(1), arriving(1)), Said(1, arriving(2), NodeLost("gone"))
    hit = looked_up(third, fourth)
    with pytest.raises(NodeLost):
        hit.refresh()
    hit.close()
    assert (third.let_gone, fourth.let_gone) == ([1], [2])


def test_hosts_that_are_behind_repeat_the_latest_clear() -> None:
    first, second = Said(0, found(1, 96, cleared_ns=7)), Said(1, found(2, 96, cleared_ns=9))
    hit = looked_up(first, second)
    assert (hit.num_tokens, hit.reason) == (0, "cleared")
    assert (first.cleared_ns, second.cleared_ns) == ([9], [])
    assert (first.let_gone, second.let_gone) == ([1], [2])


def test_hosts_without_shards_are_not_asked() -> None:
    first, second = Said(0), Said(1, found(2, 96))
    first.shards = ()  # type: ignore[assignment]
    assert looked_up(first, second).tickets == (2,)
