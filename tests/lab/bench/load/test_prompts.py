"""Text that is made up: equal names are equal text, different numbers differ, whatever
the length.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.prompts import TextPrompts, TokenPrompts

NUMBERS = st.integers(0, 2**63 - 1)


@given(NUMBERS, st.integers(0, 700), st.integers(0, 700))
def test_a_shorter_piece_is_the_beginning_of_a_longer_one(
    number: int, one: int, other: int
) -> None:
    for prompts in (TokenPrompts(3), TextPrompts(3)):
        short, long = (prompts.piece("block", number, length) for length in sorted((one, other)))
        assert long[: len(short)] == short
    assert len(TokenPrompts(3).piece("block", number, one)) == one
    assert len(TextPrompts(3).piece("block", number, one).split()) == one


@given(NUMBERS, NUMBERS, st.integers(2, 50_000))
def test_different_numbers_differ_within_their_digits(one: int, other: int, num_ids: int) -> None:
    prompts = TokenPrompts(first_id=5, vocab_size=5 + num_ids)
    digits = 63  # enough to any base
    assert (prompts.piece("block", one, digits) == prompts.piece("block", other, digits)) == (
        one == other
    )


def test_small_numbers_differ_in_the_first_token() -> None:
    firsts = {TokenPrompts().piece("block", number, 1)[0] for number in range(7_744)}
    assert len(firsts) == 7_744
    assert (min(firsts), max(firsts)) == (256, 7_999)


@given(NUMBERS)
def test_token_ids_stay_within_their_bounds(number: int) -> None:
    assert all(
        10 <= token < 13
        for token in TokenPrompts(first_id=10, vocab_size=13).piece("block", number, 200)
    )


def test_names_and_seeds_are_different_texts() -> None:
    first, name, seed = (
        TokenPrompts(0).piece("a", 1, 512),
        TokenPrompts(0).piece("b", 1, 512),
        TokenPrompts(1).piece("a", 1, 512),
    )
    assert first == TokenPrompts(0).piece("a", 1, 512)
    assert first != name
    assert first != seed


@pytest.mark.parametrize(("first_id", "vocab_size"), [(100, 100), (100, 101), (-1, 10), (0, 0)])
def test_a_vocabulary_that_is_too_small_is_an_error(first_id: int, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="too few"):
        TokenPrompts(first_id=first_id, vocab_size=vocab_size)
