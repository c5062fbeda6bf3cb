"""Prompts with content that is no text: named by it and its place from the first chunk on that it
touches, and shared before that.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvhold.core.encoding import canonical
from kvhold.core.keys import HASH_BYTES, Insert, Namespace, Prompt
from kvhold.core.layout import Group, Layout

GROUP = Group(layers=2, planes=2, heads=2, head_dim=8, dtype="float16")
SIZE = 4
SPACE = Namespace(model="llava", layout=Layout((GROUP,), tokens_per_chunk=SIZE, tail_tokens=1))
BLOCKS = Namespace(model="llava", layout=Layout((GROUP,), tokens_per_chunk=16, tail_tokens=4))
TEXT = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4, 9, 9, 9, 9, 9, 9, 5, 6]  # 9 stands where something else is


def names(prompt: Prompt) -> list[bytes]:
    """Hashes of its chunks, and of its tails."""
    joined = prompt.chain + prompt.tails
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def shared(one: Prompt, other: Prompt) -> int:
    """How many chunks and tails from the first on have one name.

    Asserts that there is no name in common after that.
    """
    ours, theirs = names(one), names(other)
    count = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    assert not set(ours[count:]) & set(theirs[count:])
    return count


def with_images(*inserts: tuple[int, int, bytes | str]) -> Prompt:
    return SPACE.prompt(TEXT, inserts=[Insert(*insert) for insert in inserts])


class TestWhatCounts:
    def test_the_text_before_it_is_shared_and_nothing_after_that(self) -> None:
        plain, image, other = (
            with_images(),
            with_images((10, 6, b"cat")),
            with_images((10, 6, b"dog")),
        )
        assert shared(plain, image) == shared(image, other) == 10 // SIZE

    def test_the_same_content_at_another_place_is_something_else(self) -> None:
        assert shared(with_images((2, 6, b"cat")), with_images((10, 6, b"cat"))) == 0
        assert shared(with_images((10, 6, b"cat")), with_images((11, 5, b"cat"))) == 2, (
            "though it fills as much of the later chunks"
        )

    def test_it_counts_how_long_it_is_even_where_that_cannot_be_seen_yet(self) -> None:
        longer, shorter = with_images((2, 6, b"cat")), with_images((2, 5, b"cat"))
        assert shared(longer, shorter) == 0
        assert longer.until(SIZE).chain != shorter.until(SIZE).chain, (
            "a chunk that ends inside of both"
        )

    def test_two_that_trade_places_share_nothing_from_the_first_on(self) -> None:
        one, other = (
            with_images((2, 6, b"cat"), (10, 6, b"dog")),
            with_images((2, 6, b"dog"), (10, 6, b"cat")),
        )
        assert shared(one, other) == 0

    def test_two_side_by_side_are_not_one(self) -> None:
        assert shared(with_images((2, 3, b"cat"), (5, 3, b"cat")), with_images((2, 6, b"cat"))) == 0
        assert (
            shared(with_images((2, 3, b"cat"), (5, 3, b"cat")), with_images((2, 3, b"catcat"))) == 0
        )

    def test_the_second_changes_only_what_comes_after_it_begins(self) -> None:
        one, other = (
            with_images((2, 6, b"cat"), (10, 6, b"dog")),
            with_images((2, 6, b"cat"), (10, 6, b"cow")),
        )
        assert shared(one, other) == 2

    def test_bytes_and_text_and_a_digest_cut_short_are_other_digests(self) -> None:
        digest = "0123456789abcdef" * 4
        prompts = [
            with_images((2, 6, d))
            for d in (
                digest,
                digest.encode(),
                bytes.fromhex(digest),
                digest[:-1],
                digest + "0",
                digest[:4],
            )
        ]
        assert len({prompt.chain for prompt in prompts}) == len(prompts)

    @pytest.mark.parametrize("length", [32, 1000, 100_000])
    def test_every_byte_of_a_digest_counts_however_long_it_is(self, length: int) -> None:
        digest = bytearray(length)
        plain = with_images((2, 6, bytes(digest))).chain
        for at in (0, length // 2, length - 1):
            changed = bytearray(digest)
            changed[at] = 1
            assert with_images((2, 6, bytes(changed))).chain != plain

    def test_the_order_in_which_they_are_given_does_not_count(self) -> None:
        assert names(with_images((10, 6, b"dog"), (2, 6, b"cat"))) == names(
            with_images((2, 6, b"cat"), (10, 6, b"dog"))
        )

    def test_any_kind_of_whole_number_is_the_same_number(self) -> None:
        start: Any = np.int64(2)
        length: Any = np.uint8(6)
        assert names(with_images((start, length, b"cat"))) == names(with_images((2, 6, b"cat")))

    def test_a_prompt_without_any_has_the_keys_of_text(self) -> None:
        assert names(SPACE.prompt(TEXT, inserts=())) == names(SPACE.prompt(TEXT))

    def test_no_extra_gives_the_names_that_an_insert_gives(self) -> None:
        """Not even the one that is made of the same bytes."""
        image = with_images((0, 2, b"cat"))
        guesses = [
            b"cat",
            canonical(["cat"]),
            canonical([b"", [[0, 2, b"cat"]]]),
            canonical([[0, 2, b"cat"]]),
        ]
        assert all(
            SPACE.prompt(TEXT, {0: guess}).hash_at(0) != image.hash_at(0) for guess in guesses
        )

    def test_an_extra_of_a_chunk_with_an_insert_counts_as_well(self) -> None:
        prompts = [
            SPACE.prompt(TEXT, extras, inserts=[Insert(2, 6, b"cat")])
            for extras in ({}, {0: b"x"}, {1: b"x"}, {0: b"y"})
        ]
        assert len({prompt.hash_at(1) for prompt in prompts}) == 4


class TestTails:
    def test_a_tail_that_one_touches_is_named_by_it_and_one_before_it_is_not(self) -> None:
        text = list(range(13))
        plain, image, other = (
            BLOCKS.prompt(text, inserts=inserts)
            for inserts in ([], [Insert(5, 6, "cat")], [Insert(5, 6, "dog")])
        )
        assert plain.tail_lengths == (4, 8, 12)
        assert shared(plain, image) == shared(image, other) == 1

    def test_a_tail_of_any_length_is_named_by_what_it_touches(self) -> None:
        at_end, other, before = (
            SPACE.prompt(range(7), inserts=[insert])
            for insert in (Insert(6, 1, "a"), Insert(6, 1, "b"), Insert(1, 1, "a"))
        )
        assert shared(at_end, other) == 1
        assert shared(at_end, before) == 0

    def test_what_touches_whole_chunks_alone_is_in_the_tail_by_the_chain(self) -> None:
        one, other = (
            SPACE.prompt(range(7), inserts=[Insert(1, 2, digest)]) for digest in ("a", "b")
        )
        assert not set(names(one)) & set(names(other))


class TestCut:
    """`until`: the same names as far as it reaches, because an insert is named whole wherever the
    prompt is cut.
    """

    @given(st.integers(0, len(TEXT)))
    def test_the_chunks_of_a_cut_prompt_are_those_of_the_whole(self, num_tokens: int) -> None:
        whole = with_images((2, 6, b"cat"), (10, 6, b"dog"))
        cut = whole.until(num_tokens)
        assert cut.num_tokens == num_tokens
        assert whole.chain.startswith(cut.chain)
        assert cut.chunks(tail=False) == whole.chunks(last=num_tokens // SIZE, tail=False)

    def test_a_text_is_cut_to_a_shorter_text(self) -> None:
        for num_tokens in range(30):
            cut, made = BLOCKS.prompt(range(30)).until(num_tokens), BLOCKS.prompt(range(num_tokens))
            assert (cut.query(), cut.chunks()) == (made.query(), made.chunks())

    @pytest.mark.parametrize("num_tokens", [-1, 19])
    def test_a_prompt_cannot_be_cut_to_more_than_it_has(self, num_tokens: int) -> None:
        with pytest.raises(AssertionError):
            SPACE.prompt(TEXT).until(num_tokens)


class TestBadInserts:
    @pytest.mark.parametrize(
        ("inserts", "message"),
        [
            ([(-1, 2, b"x")], r"inserts\[0\]\.start is -1; it must be 0 or more"),
            ([(0, 1, b"x"), (3, 0, b"x")], r"inserts\[1\]\.length is 0; it must be 1 or more"),
            ([(3, -2, b"x")], r"inserts\[0\]\.length is -2; it must be 1 or more"),
            (
                [(15, 4, b"x")],
                (
                    r"inserts\[0\]\.length is 4: it spans tokens 15 to 19, beyond the prompt's "
                    r"18 tokens"
                ),
            ),
            (
                [(18, 1, b"x")],
                (
                    r"inserts\[0\]\.length is 1: it spans tokens 18 to 19, beyond the prompt's "
                    r"18 tokens"
                ),
            ),
            ([(0, 2**70, b"x")], r"inserts\[0\]\.length is .*, beyond the prompt's 18 tokens"),
            (
                [(2, 6, b"x"), (7, 2, b"y")],
                (
                    r"inserts\[1\]\.start is 7, inside inserts\[0\] at 2 to 8; "
                    r"inserts must not overlap"
                ),
            ),
            (
                [(7, 2, b"x"), (2, 6, b"y")],
                (
                    r"inserts\[0\]\.start is 7, inside inserts\[1\] at 2 to 8; "
                    r"inserts must not overlap"
                ),
            ),
            (
                [(2, 6, b"x"), (2, 6, b"x")],
                r"inserts\[1\]\.start is 2, inside inserts\[0\] at 2 to 8",
            ),
            (
                [(0, 9, b"x"), (12, 1, b"x"), (3, 1, b"x")],
                r"inserts\[2\]\.start is 3, inside inserts\[0\] at 0 to 9",
            ),
            (
                [(2, 6, b"")],
                r"inserts\[0\]\.digest is b''; it must be the full hash of the content",
            ),
            ([(2, 6, "")], r"inserts\[0\]\.digest is ''; it must be"),
            ([(2, 6, None)], r"inserts\[0\]\.digest is None; it must be"),
            ([(2, 6, 1234)], r"inserts\[0\]\.digest is 1234; it must be"),
            ([(2, 6, [b"x"])], r"inserts\[0\]\.digest is \[b'x'\]; it must be"),
            ([(2.0, 6, b"x")], r"inserts\[0\]\.start is 2\.0; it must be a whole number"),
            ([(None, 6, b"x")], r"inserts\[0\]\.start is None; it must be a whole number"),
            ([(2, "6", b"x")], r"inserts\[0\]\.length is '6'; it must be a whole number"),
            ([(2, True, b"x")], r"inserts\[0\]\.length is True; it must be"),
        ],
    )
    def test_are_refused_with_the_name_of_what_is_wrong(
        self, inserts: list[Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            SPACE.prompt(TEXT, inserts=[Insert(*insert) for insert in inserts])

    def test_something_else_is_none(self) -> None:
        pair: Any = (2, 6)
        with pytest.raises(ValueError, match=r"inserts\[0\] is \(2, 6\); it must be an Insert"):
            SPACE.prompt(TEXT, inserts=[pair])

    def test_those_that_touch_each_other_are_apart(self) -> None:
        SPACE.prompt(TEXT, inserts=[Insert(0, 9, b"x"), Insert(9, 9, b"x")])


@st.composite
def prompts(draw: st.DrawFn, num_tokens: int) -> tuple[Insert, ...]:
    """Inserts of a prompt, apart, with few digests, so that equal ones are frequent."""
    inserts, at = [], 0
    digests: st.SearchStrategy[bytes | str] = st.sampled_from([b"cat", b"dog", "cat"])
    while at < num_tokens and draw(st.booleans()):
        start = draw(st.integers(at, num_tokens - 1))
        length = draw(st.integers(1, num_tokens - start))
        inserts.append(Insert(start, length, draw(digests)))
        at = start + length
    return tuple(inserts)


@given(
    st.data(),
    st.integers(0, 24),
    st.sampled_from([SPACE, BLOCKS, replace(BLOCKS, layout=replace(BLOCKS.layout, tail_tokens=0))]),
)
def test_a_name_is_shared_exactly_where_all_that_was_touched_so_far_is_equal(
    data: st.DataObject, num_tokens: int, space: Namespace
) -> None:
    """Two prompts of the same tokens, with any inserts: a chunk or tail has one name just if the
    same inserts are touched up to its end.
    """
    one, other = data.draw(prompts(num_tokens)), data.draw(prompts(num_tokens))
    assume(one or other)
    ours, theirs = (space.prompt([9] * num_tokens, inserts=inserts) for inserts in (one, other))
    size = space.layout.tokens_per_chunk
    ends = [(chunk + 1) * size for chunk in range(ours.num_whole)] + [
        ours.num_whole * size + tail for tail in ours.tail_lengths
    ]
    for end, a, b in zip(ends, names(ours), names(theirs), strict=True):
        touched = [[insert for insert in inserts if insert.start < end] for inserts in (one, other)]
        assert (a == b) == (list(map(typed, touched[0])) == list(map(typed, touched[1]))), (
            f"the chunk or tail that ends at {end}"
        )


def typed(insert: Insert) -> tuple[int, int, bytes | str, type]:
    return insert.start, insert.length, insert.digest, type(insert.digest)
