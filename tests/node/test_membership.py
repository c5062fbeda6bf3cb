"""What a client decides about its links, event by event."""

from dataclasses import dataclass, field

import pytest

from kvhold.core.errors import NodeError
from kvhold.core.keys import Namespace
from kvhold.core.store_options import DEFAULT_OPTIONS
from kvhold.net import messages as m
from kvhold.node.membership import Departures, Duty, Lifetime, Membership
from kvhold.testing.cache import PLAIN


@dataclass(eq=False)
class ALink:
    retired: bool = False
    silent_s: float = 0.0
    last_heard_s: float = 0.0
    has_loose_ends: bool = False
    closed: bool = False
    uses_device: bool = False
    welcome: m.Welcome = field(default_factory=lambda: welcome_to(1))

    @classmethod
    def of_device(cls, run: int, number: int) -> "ALink":
        return cls(uses_device=True, welcome=welcome_to(run, number))


def welcome_to(run: int, number: int = 1) -> m.Welcome:
    return m.Welcome(m.PROTOCOL_VERSION, "0", 1, 2 << 20, False, run=run, number=number)


def a_request(model: str) -> m.Register:
    return m.Register(PLAIN, Namespace(model=model, layout=PLAIN).digest, DEFAULT_OPTIONS)


def test_a_retired_link_is_over_when_nobody_calls_or_holds_the_arena() -> None:
    life = Lifetime()
    life.enter()
    life.hold()
    life.hold()
    life.retired = True
    for step in (life.leave, life.let_go):
        step()
        assert not life.is_over
    life.let_go()
    assert life.is_over


def test_a_link_in_use_is_not_over_though_nobody_uses_it_now() -> None:
    life = Lifetime()
    life.hold()
    life.let_go()
    assert not life.is_over


def test_a_retired_link_is_neither_called_nor_held() -> None:
    life = Lifetime()
    life.retired = True
    with pytest.raises(ConnectionError):
        life.enter()
    with pytest.raises(NodeError):
        life.hold()
    assert life.is_over


def test_in_a_forked_child_a_link_ends_with_what_is_held_there() -> None:
    life = Lifetime()
    life.enter()
    life.hold()
    life.forget_callers()
    assert not life.is_over
    life.let_go()
    assert life.is_over


def test_a_lost_link_is_not_used_and_another_one_is_lost_by_nobody() -> None:
    link, other = ALink(), ALink()
    membership = Membership("here", link)
    assert membership.current("ping") is link
    assert not membership.lose(other)
    assert membership.lose(link)
    assert not membership.lose(link)
    with pytest.raises(NodeError, match="ping: no node on here"):
        membership.current("ping")


def test_a_new_link_is_told_every_namespace_before_it_is_used() -> None:
    membership = Membership[ALink]("here")
    link, told = ALink(), set[bytes]()
    membership.register(a_request("one"))
    assert membership.introduce(link, told) == [a_request("one")]
    assert membership.link is None
    told.add(a_request("one").namespace)
    membership.register(a_request("two"))  # meanwhile
    assert membership.introduce(link, told) == [a_request("two")]
    told.add(a_request("two").namespace)
    assert membership.introduce(link, told) == []
    assert membership.current("ping") is link


def test_a_client_that_was_closed_uses_no_new_link() -> None:
    link = ALink()
    membership = Membership("here", link)
    assert membership.close() is link
    assert membership.introduce(ALink(), set()) == []
    assert membership.link is None
    with pytest.raises(NodeError, match="closed"):
        membership.current("ping")


def test_a_silent_node_is_not_asked_and_gets_little_time_for_returns() -> None:
    link = ALink(silent_s=0.9)
    membership = Membership("here", link)
    assert not membership.is_silent(link, 1.0)
    assert membership.return_within_s(link, 1.0) == 1.0
    link.silent_s = 1.1
    assert membership.is_silent(link, 1.0)
    assert "lookup: the node on here has not answered for 1.1 s" in str(
        membership.silence(link, "lookup")
    )
    within_s = membership.return_within_s(link, 1.0)
    assert within_s is not None
    assert within_s < 0.01
    link.retired = True
    assert membership.return_within_s(link, 1.0) is None


def test_a_refusal_is_news_once() -> None:
    membership = Membership[ALink]("here")
    assert [membership.is_news(reason) for reason in ("version", "version", "full")] == [
        True,
        False,
        True,
    ]
    membership.introduce(ALink(), set())
    assert membership.is_news("full")


@pytest.mark.parametrize(
    ("link", "duty"),
    [
        (None, Duty.REJOIN),
        (ALink(has_loose_ends=True), Duty.TEND),
        (ALink(last_heard_s=8.0), Duty.PING),
        (ALink(last_heard_s=8.5), Duty.REST),
    ],
)
def test_what_the_keeper_does_next(link: ALink | None, duty: Duty) -> None:
    assert Membership("here", link).duty(link, 10.0, 2.0) is duty


def test_a_link_that_is_not_in_use_is_not_tried() -> None:
    assert Membership("here", ALink()).duty(ALink(), 10.0, 2.0) is Duty.REST


def test_a_node_is_told_of_a_lost_link_when_nobody_uses_the_arena_through_it_any_more() -> None:
    lost, link = ALink.of_device(run=7, number=3), ALink(welcome=welcome_to(7, 4))
    membership = Membership("here", lost)
    membership.lose(lost)
    membership.introduce(link, set())
    assert membership.departures.due(link) == [], "a device may still copy"
    assert membership.duty(link, 0.0, 2.0) is Duty.REST
    lost.closed = True
    assert membership.duty(link, 0.0, 2.0) is Duty.DEPART
    [departed] = membership.departures.due(link)
    assert departed == m.Departed(run=7, number=3)
    membership.departures.told(departed)
    assert membership.duty(link, 0.0, 2.0) is Duty.REST


def test_of_a_link_that_no_device_uses_and_of_one_to_an_earlier_node_nobody_is_told() -> None:
    departures = Departures()
    for link in (ALink(closed=True), ALink.of_device(run=6, number=3)):
        departures.add(link)
        link.closed = True
    assert departures.due(ALink(welcome=welcome_to(7))) == []
    assert departures.due(ALink(welcome=welcome_to(6))) == [], (
        "the earlier node has ended, and is forgotten"
    )


def test_a_closed_client_leaves_it_to_another_one_of_its_process_to_tell() -> None:
    departures = Departures()
    link, other = ALink.of_device(run=7, number=3), ALink(welcome=welcome_to(7, 4))
    Membership("here", link, departures).close()
    link.closed = True
    assert Membership("here", other, departures).duty(other, 0.0, 2.0) is Duty.DEPART
