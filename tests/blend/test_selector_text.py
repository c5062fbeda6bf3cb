"""A selector's text tells its settings, and gives it again."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.blend.selection import (
    Budget,
    DeviationSelector,
    FirstTokensSelector,
    NoSelection,
    QuerySelector,
    parse_selector,
    selector_of,
    selector_text,
)
from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError

RATIOS = st.floats(0, 1).map(lambda ratio: Budget(ratio=ratio))
BUDGETS = RATIOS | st.floats(0, 1e9).map(lambda bound: Budget(bound=bound))
SELECTORS = st.one_of(
    st.builds(NoSelection),
    st.builds(FirstTokensSelector, RATIOS),
    st.builds(QuerySelector, BUDGETS),
    st.builds(
        DeviationSelector,
        st.lists(BUDGETS, min_size=1, max_size=3).map(tuple),
        of=st.sampled_from(["values", "keys"]),
        check_layer=st.integers(0, 99),
    ),
)


@given(selector=SELECTORS)
def test_it_can_be_read_back(selector: Any) -> None:
    again = parse_selector(selector_text(selector))
    assert type(again) is type(selector)
    assert again.budgets == selector.budgets
    assert again.check_layer == selector.check_layer
    assert getattr(again, "of", "") == getattr(selector, "of", "")
    assert selector_text(again) == selector_text(selector)


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("none", NoSelection()),
        ("query ratio=0.1", QuerySelector(Budget(ratio=0.1))),
        ("query bound=3.0", QuerySelector(Budget(bound=3))),
        ("first ratio=1.0", FirstTokensSelector(Budget(ratio=1))),
        ("deviation check_layer=1 ratio=0.15", DeviationSelector((Budget(ratio=0.15),))),
        (
            "deviation check_layer=2 of=keys ratio=0.3,0.15",
            DeviationSelector((Budget(ratio=0.3), Budget(ratio=0.15)), of="keys", check_layer=2),
        ),
    ],
)
def test_is_short_and_plain(text: str, selector: Any) -> None:
    assert selector_text(selector) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "selector is ''; known are deviation, first, query, none"),
        ("quer ratio=0.1", "known are deviation, first, query, none"),
        ("none ratio=0.1", "selector is 'none ratio=0.1'"),
        ("query", "give a ratio or a bound"),
        ("query ratio=0.1 bound=2", "give a ratio or a bound, and not both"),
        ("query ratio=2", "ratio is 2.0; it must be from 0 to 1"),
        ("query ratio=nan", "ratio is nan"),
        ("query ratio=much", "could not convert"),
        ("query ratio=0.1 check_layer=1", "has no 'check_layer'; known: ['bound', 'ratio']"),
        ("query ratio=0.1,0.2", "wrong number of budgets"),
        ("deviation ratio=0.1,0.2 bound=1", "wrong number of budgets"),
        ("deviation ratio=0.1 of=queries", "of is 'queries'"),
        ("first bound=1", "give a ratio"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_selector(text)


class TestSettings:
    def selector(self, **settings: Any) -> Any:
        return selector_of(load_config({"blend": settings}, environ={}).blend)

    def test_off_by_default(self) -> None:
        assert self.selector() is None

    def test_make_a_selector(self) -> None:
        found = self.selector(selector="deviation", ratio="0.2", check_layer=2)
        assert selector_text(found) == "deviation check_layer=2 ratio=0.2"
        assert selector_text(self.selector(selector="none")) == "none"

    def test_without_a_budget_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"blend.selector is 'query': give a ratio"):
            self.selector(selector="query")
