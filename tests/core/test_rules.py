"""What a request may do with the cache: its own word within what the settings allow; what is not understood is an error that names it."""

from typing import Any

import pytest

from kvhold.core.config import RulesConfig
from kvhold.core.errors import ConfigError
from kvhold.core.rules import Rules, request_rules


def test_a_request_that_says_nothing_may_do_everything() -> None:
    assert request_rules(None, RulesConfig()) == request_rules({}, RulesConfig()) == Rules(True, True, None, ())


def test_a_request_may_say_what_it_does_not_want() -> None:
    asked = {"store": False, "load": False, "ttl_s": 5, "tags": {"b": "2", "a": "1"}}
    assert request_rules(asked, RulesConfig()) == Rules(False, False, 5.0, (("a", "1"), ("b", "2")))


def test_what_the_settings_forbid_stays_forbidden() -> None:
    settings = RulesConfig(store=False, load=False, ttl_s=60)
    assert request_rules({"store": True, "load": True, "ttl_s": 3600}, settings) == Rules(False, False, 60.0)
    assert request_rules({"ttl_s": 5}, settings).ttl_s == 5
    assert request_rules({}, settings).ttl_s == 60


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("store", "must hold some of store, load, ttl_s, tags"),
        ({"stor": True}, r"kvhold\.stor: there is no such rule"),
        ({"store": "no"}, r"kvhold\.store = 'no': must be true or false"),
        ({"load": 0}, r"kvhold\.load = 0: must be true or false"),
        ({"ttl_s": 0}, r"kvhold\.ttl_s = 0: must be a number of seconds above 0"),
        ({"ttl_s": float("nan")}, r"kvhold\.ttl_s"),
        ({"ttl_s": float("inf")}, r"kvhold\.ttl_s"),
        ({"ttl_s": True}, r"kvhold\.ttl_s"),
        ({"tags": ["a"]}, r"kvhold\.tags"),
        ({"tags": {"a": 1}}, r"kvhold\.tags"),
    ],
)
def test_what_is_not_understood_is_named(asked: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        request_rules(asked, RulesConfig())
