"""The encoding behind every name: equal bytes mean equal values of the same types."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.encoding import Plain, canonical

plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(st.characters()),  # lone surrogates, too
        st.binary(),
        st.sampled_from(
            [0, 0.0, -0.0, False, "", b"", "0", b"0", 1, 1.0, True, "1", b"1", "None", None]
        ),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """`value` so that `==` tells its types apart, and 0.0 from -0.0."""
    if isinstance(value, (list, tuple)):
        return [typed(item) for item in value]
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


@given(plain, plain)
def test_equal_bytes_mean_equal_values_of_the_same_types(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


@given(st.lists(st.text(max_size=3), max_size=5), st.lists(st.text(max_size=3), max_size=5))
def test_text_cannot_move_over_a_border(one: list[str], other: list[str]) -> None:
    assert (canonical(one) == canonical(other)) == (one == other)


@given(st.lists(plain, min_size=1, max_size=4), st.data())
def test_no_value_is_the_beginning_of_another(items: list[Any], data: st.DataObject) -> None:
    """So that what follows a value cannot be taken for its end."""
    one, other = data.draw(st.sampled_from(items)), data.draw(st.sampled_from([*items, items]))
    if canonical(one) != canonical(other):
        assert not canonical(other).startswith(canonical(one))


def test_a_nest_is_not_its_content() -> None:
    nests: list[Plain] = [[], [[]], [[], []], [[[]]], ["a"], [["a"]], ["a", []], [[], "a"], "a"]
    assert len(set(map(canonical, nests))) == len(nests)


@given(st.lists(plain, max_size=4))
def test_a_list_and_a_tuple_are_the_same(items: list[Any]) -> None:
    assert canonical(items) == canonical(tuple(items))


def test_the_bytes_are_as_documented() -> None:
    assert canonical(None) == b"n" + bytes(8)
    assert canonical(-12) == b"i\x03" + bytes(7) + b"-12"
    assert (
        canonical(["é", b"\x00"])
        == b"l\x15" + bytes(7) + b"s\x02" + bytes(7) + b"\xc3\xa9" + b"b\x01" + bytes(7) + b"\x00"
    )


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, {1, 2}, object(), 1j, ["fine", {"not": "fine"}], bytearray(b"x"), memoryview(b"x")],
)
def test_what_has_no_encoding_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot name a"):
        canonical(value)
