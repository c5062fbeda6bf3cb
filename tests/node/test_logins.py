"""Connections that have not logged in: whoever is new gets in, and nobody who has
logged in goes.
"""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.net.addresses import is_loopback, network_of
from kvhold.node.logins import Logins, StrangersLog


def test_one_network_only_crowds_out_itself() -> None:
    logins = Logins[int](most=8, most_of_network=4)
    assert [logins.add(n, "a") for n in range(4)] == [None] * 4
    assert logins.add(100, "b") is None
    assert [logins.add(n, "a") for n in range(4, 20)] == list(range(16))
    assert len(logins) == 5


def test_when_all_is_taken_the_oldest_of_the_largest_network_goes() -> None:
    logins = Logins[int](most=4, most_of_network=3)
    for connection, network in enumerate("aaab"):
        assert logins.add(connection, network) is None
    assert logins.add(4, "c") == 0


def test_whoever_has_logged_in_is_crowded_out_by_nobody() -> None:
    logins = Logins[int](most=4, most_of_network=2)
    logins.add(-1, "a")
    logins.remove(-1)
    logins.remove(-1)
    assert -1 not in [logins.add(n, "a") for n in range(100)]


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=60))
def test_there_are_never_more_than_the_limits_say(steps: list[tuple[str, bool]]) -> None:
    logins, live = Logins[int](most=5, most_of_network=3), {}
    for number, (network, leaves) in enumerate(steps):
        gone = logins.add(number, network)
        live[number] = network
        if gone is not None:
            del live[gone]
        assert number in live, "whoever is new gets in"
        if leaves:
            logins.remove(oldest := min(live))
            del live[oldest]
        assert len(logins) == len(live) <= 5
        assert all(list(live.values()).count(name) <= 3 for name in live.values())


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    strangers = StrangersLog(logging.getLogger("test"), clock=lambda: now_s)
    for _ in range(10_000):
        strangers.refused("10.0.0.1", "a token is needed")
    assert len(caplog.records) == 20
    now_s = 61.0
    strangers.refused("10.0.0.1", "a token is needed")
    assert [record.getMessage() for record in caplog.records[20:]] == [
        "refused 9980 more clients in the last 61 s",
        "refused a client from 10.0.0.1: a token is needed",
    ]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somewhere", "somewhere"),
    ],
)
def test_a_host_counts_by_its_address_or_its_64(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("cache.example", False),
        ("", False),
    ],
)
def test_what_is_this_host_alone(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own
