"""Texts of facts are injective, whatever plain value they come from."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import LayoutError
from kvhold.core.naming import MAX_TEXT, Facts, NamingRules, Table, text_of, walk


class Kind(Enum):
    A = 1


class Number(IntEnum):
    A = 1


class Pair(NamedTuple):
    a: int
    b: int


@dataclass
class Inner:
    size: int = 1
    port: int = 0


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    inners: list[Inner] = field(default_factory=list)
    name: str = ""


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """The value so that 1, 1.0 and True differ."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, dict):
        return "mapping", sorted((key, repr(typed(item))) for key, item in value.items())
    return type(value).__name__, repr(value)


@given(plain, plain)
def test_two_values_have_one_text_only_if_they_are_equal(one: Any, two: Any) -> None:
    assert (text_of(one, "it") == text_of(two, "it")) == (typed(one) == typed(two))


def test_values_that_look_alike_differ() -> None:
    values = [
        None,
        "None",
        1,
        1.0,
        True,
        "1",
        Kind.A,
        Number.A,
        [1],
        [[1]],
        {1},
        {"1": 1},
        {1: 1},
        b"1",
        Path("1"),
        Pair(1, 1),
        [1, 1],
    ]
    assert len({text_of(value, "it") for value in values}) == len(values)


def test_order_counts_in_lists_and_not_in_sets_and_mappings() -> None:
    assert text_of([1, 2], "it") != text_of([2, 1], "it")
    assert text_of({"a": 1, "b": 2}, "it") == text_of({"b": 2, "a": 1}, "it")
    assert text_of({"x", "y", "z"}, "it") == text_of({"z", "y", "x"}, "it")
    assert text_of(Counter("abca"), "it") == text_of(Counter("aacb"), "it")


def test_long_texts_are_told_apart_by_digest() -> None:
    long = ["x" * 10_000 + end for end in "ab"]
    texts = [text_of(value, "it") for value in long]
    assert texts[0] != texts[1] and all(len(text) <= MAX_TEXT for text in texts)


@pytest.mark.parametrize("value", [object(), [object()], {"a": (lambda: 0)}, print, int, Outer])
def test_what_is_no_plain_value_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(LayoutError, match=r"engine\.field.*no plain value"):
        text_of(value, "engine.field")


def found(value: Any, rules: NamingRules) -> dict[str, str]:
    facts: dict[str, str] = {}
    walk(value, "engine", rules, facts)
    return facts


def test_harmless_fields_are_left_out_wherever_the_object_is() -> None:
    rules = NamingRules({"Inner": Table.of("size", {"a port": "port"})})
    one, two = Outer(Inner(1, 5), [Inner(2, 6)], "n"), Outer(Inner(1, 7), [Inner(2, 8)], "n")
    assert found(one, rules) == found(two, rules)
    assert found(one, rules)["engine.inner.size"] == "1"
    two.inners[0].size = 3
    assert found(one, rules) != found(two, rules)
    assert found(one, NamingRules()) != found(two, NamingRules()), (
        "a class without a table is named whole"
    )


def test_attributes_that_are_no_fields_are_named() -> None:
    one = Outer()
    one.extra = 1  # type: ignore[attr-defined]
    assert found(one, NamingRules())["engine.extra"] == "1"


def test_facts_are_the_same_in_any_order() -> None:
    assert Facts.of({"a": "1", "b": "2"}).digest == Facts.of({"b": "2", "a": "1"}).digest
    assert Facts.of({"a": "1"}).digest != Facts.of({"a": "2"}).digest != Facts.of({"a1": ""}).digest
