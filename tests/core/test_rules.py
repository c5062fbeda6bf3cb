"""What a request may do with the cache: its own word within what the settings allow; what is not
understood is an error that names it.
"""

from typing import Any

import pytest

from kvhold.core.config import RulesConfig
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Namespace, allows_loss
from kvhold.core.rules import RequestRules, check_tags, request_rules
from kvhold.core.store_options import StoreOptions
from kvhold.core.tags import tag_digests
from kvhold.testing.cache import PLAIN

SPACE = Namespace("model", PLAIN)


def test_a_request_that_says_nothing_may_do_everything() -> None:
    assert (
        request_rules(None, RulesConfig())
        == request_rules({}, RulesConfig())
        == RequestRules(True, True, False, StoreOptions(), ())
    )


def test_a_request_may_say_what_it_does_not_want() -> None:
    tags = {"b": "2", "a": "1"}
    asked = {"store": False, "load": False, "plan": False, "ttl_s": 5, "tags": tags}
    options = StoreOptions(ttl_s=5.0, tags=tag_digests(tags.items()))
    assert request_rules(asked, RulesConfig()) == RequestRules(
        False, False, False, options, (("a", "1"), ("b", "2"))
    )


def test_what_the_settings_forbid_stays_forbidden() -> None:
    settings = RulesConfig(store=False, load=False, plan=False, ttl_s=60)
    asked = {"store": True, "load": True, "plan": True, "ttl_s": 3600}
    assert request_rules(asked, settings) == RequestRules(
        False, False, False, StoreOptions(ttl_s=60.0)
    )
    assert request_rules({"ttl_s": 5}, settings).store_options.ttl_s == 5
    assert request_rules({}, settings).store_options.ttl_s == 60


def test_a_request_waits_for_computing_only_where_settings_and_request_allow_it() -> None:
    on, off = RulesConfig(wait_for_computing=True), RulesConfig()
    assert request_rules(None, on).wait_for_computing
    assert not request_rules({"wait_for_computing": False}, on).wait_for_computing
    assert not request_rules({"wait_for_computing": True}, off).wait_for_computing


def test_a_budget_is_the_smaller_of_both_and_separates_what_was_stored_under_it() -> None:
    settings = RulesConfig(max_error=0.05, max_bits=4)
    rules = request_rules({"max_error": 0.01, "max_bits": 8}, settings)
    assert (rules.store_options.max_error, rules.store_options.max_bits) == (0.01, 4)
    assert dict(rules.tags) == {"kvhold.max_error": "0.01", "kvhold.max_bits": "4.0"}


@pytest.mark.parametrize(
    ("asked", "settings", "tags"),
    [
        ({}, {}, {}),
        ({"max_error": 0}, {}, {}),
        ({"max_error": 0.01}, {}, {"kvhold.max_error": "0.01"}),
        ({"max_error": 1}, {}, {"kvhold.max_error": "1.0"}),
        ({"max_bits": 4}, {}, {"kvhold.max_bits": "4.0"}),
        ({}, {"max_error": 1}, {"kvhold.max_error": "1.0"}),
        ({}, {"max_bits": 4}, {"kvhold.max_bits": "4.0"}),
        ({"max_error": 0}, {"max_error": 1, "max_bits": 4}, {}),
        ({"max_error": 1}, {"max_error": 0}, {}),
        ({"max_bits": 4}, {"max_error": 0}, {}),
        ({}, {"max_error": 0, "max_bits": 4}, {}),
    ],
    ids=str,
)
def test_a_loss_is_allowed_by_a_budget_alone_and_is_then_in_the_name(
    asked: dict[str, float], settings: dict[str, Any], tags: dict[str, str]
) -> None:
    rules = request_rules(asked, RulesConfig(**settings))
    assert dict(rules.tags) == tags
    assert rules.store_options.allows_loss == bool(tags)
    named = SPACE.narrowed(tags=rules.tags)
    assert allows_loss(named.digest) == bool(tags)
    assert (named.digest == SPACE.digest) == (not tags)


def test_a_tenant_is_what_the_tag_says_where_the_settings_name_none() -> None:
    assert request_rules({"tags": {"tenant": "a"}}, RulesConfig()).store_options.tenant == "a"
    rules = request_rules({}, RulesConfig(tenant="b"))
    assert (rules.store_options.tenant, rules.tags) == ("b", (("tenant", "b"),))


@pytest.mark.parametrize("named", ["victim", "", "ACME", "acme "])
def test_a_request_cannot_name_another_tenant_than_the_configured_one(named: str) -> None:
    with pytest.raises(ConfigError, match=r"kvhold\.tags\.tenant = .*rules\.tenant") as caught:
        request_rules({"tags": {"tenant": named}}, RulesConfig(tenant="acme"))
    assert "'acme'" not in str(caught.value), "nor does it learn the name"
    same = request_rules({"tags": {"tenant": "acme", "app": "x"}}, RulesConfig(tenant="acme"))
    assert (same.store_options.tenant, same.tags) == ("acme", (("app", "x"), ("tenant", "acme")))


def test_ready_made_rules_must_be_of_the_configured_tenant() -> None:
    settings = RulesConfig(tenant="acme")
    check_tags(request_rules(None, settings).tags, settings)
    check_tags((), RulesConfig())
    for tags in ((), (("tenant", "victim"),)):
        with pytest.raises(ConfigError, match=r"rules\.tenant"):
            check_tags(tags, settings)


@pytest.mark.parametrize(
    "asked",
    [
        "x" * 10**6,
        {"x" * 10**6: 1},
        {"store": "x" * 10**6},
        {"ttl_s": [0] * 10**6},
        {"tags": "x" * 10**6},
        {"tags": {"kvhold." + "x" * 10**6: ""}},
        {"tags": {"tenant": "x" * 10**6}},
    ],
    ids=lambda asked: str(asked)[:20],
)
def test_what_an_error_quotes_of_a_request_is_cut_short(asked: Any) -> None:
    for settings in (RulesConfig(), RulesConfig(tenant="acme")):
        with pytest.raises(ConfigError) as caught:
            request_rules(asked, settings)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("store", "must hold some of store, load, plan, wait_for_computing, ttl_s, max_error,"),
        ({"stor": True}, r"kvhold\.stor: there is no such rule"),
        ({"store": "no"}, r"kvhold\.store = 'no': must be true or false"),
        ({"load": 0}, r"kvhold\.load = 0: must be true or false"),
        ({"ttl_s": 0}, r"kvhold\.ttl_s = 0: must be a number above 0"),
        ({"ttl_s": float("nan")}, r"kvhold\.ttl_s"),
        ({"ttl_s": float("inf")}, r"kvhold\.ttl_s"),
        ({"ttl_s": True}, r"kvhold\.ttl_s"),
        ({"max_error": -0.1}, r"kvhold\.max_error = -0\.1: must be a number from 0 to 1"),
        ({"max_error": 2}, r"kvhold\.max_error"),
        ({"max_bits": 0}, r"kvhold\.max_bits = 0: must be a number above 0"),
        ({"tags": ["a"]}, r"kvhold\.tags"),
        (
            {"tags": {"kvhold.max_error": "0.5"}},
            r"kvhold\.tags: 'kvhold\.max_error' is reserved",
        ),
        ({"tags": {"tenant": "a" * 65}}, r"tenant"),
        ({"tags": {"a": 1}}, r"kvhold\.tags"),
    ],
)
def test_what_is_not_understood_is_named(asked: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        request_rules(asked, RulesConfig())
