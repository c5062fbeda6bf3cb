"""Spans are the marked runs of a prompt, under names that no prompt has."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.blend.spans import Span, of_ranges, refusal, span_prompt, split
from kvhold.core.keys import (
    HASH_BYTES,
    Insert,
    Namespace,
    allows_loss,
    is_span,
    make_key,
    spans_of,
)
from kvhold.core.layout import Group, Layout
from kvhold.kernels.rope import Rope

FULL = Group(layers=2, planes=2, heads=2, head_dim=16, dtype="bfloat16")
LAYOUT = Layout((FULL,), tokens_per_chunk=4)
SPACE = Namespace("model", LAYOUT, cache_salt="a", tags=(("tenant", "me"),))
ROPE = Rope(16, 16)
Texts = st.lists(st.integers(0, 3), max_size=40)


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        ([], []),
        ([1, 2, 3], []),  # nothing is marked
        ([1, 2, 9, 9, 3], [(0, 2), (4, 5)]),
        ([9, 9, 1, 2, 9, 9, 9, 9, 3, 9, 9], [(2, 4), (8, 9)]),
        ([1, 9, 9, 9, 2], [(0, 1), (3, 5)]),  # from the left, without overlap
        ([9, 9], []),
        ([1, 9], []),
    ],
)
def test_a_separator_is_part_of_no_span(tokens: list[int], spans: list[tuple[int, int]]) -> None:
    assert split(tokens, [9, 9]) == tuple(Span(*span) for span in spans)


@given(Texts, st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_spans_and_separators_make_up_the_prompt(tokens: list[int], mark: list[int]) -> None:
    spans, at, size = split(tokens, mark), 0, len(mark)
    for span in spans:
        assert (span.start - at) % size == 0
        assert tokens[at : span.start] == mark * ((span.start - at) // size)
        part = tokens[span.start : span.end]
        assert part and not any(part[i : i + size] == mark for i in range(len(part)))
        at = span.end
    if spans:
        assert tokens[at:] == mark * ((len(tokens) - at) // size)


def test_too_many_spans_and_an_empty_separator_are_errors() -> None:
    with pytest.raises(ValueError, match="separator is empty"):
        split([1, 2], [])
    with pytest.raises(ValueError, match="separator gives more than 256 spans"):
        split([1, 9] * 257, [9])
    assert len(split([1, 9] * 256, [9])) == 256
    assert split([9] * 100_000, [9]) == ()
    with pytest.raises(ValueError, match="spans gives more than 256"):
        of_ranges([(i, i + 1) for i in range(257)], 1000)


def test_ranges_are_sorted() -> None:
    assert of_ranges([[8, 10], (0, 4), (4, 8)], 10) == (Span(0, 4), Span(4, 8), Span(8, 10))
    assert of_ranges([], 10) == ()


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([(0, 4), (3, 8)], r"spans\[1\] begins at 3, inside spans\[0\], which ends at 4"),
        ([(0, 4), (8, 11)], r"spans\[1\] is 8 to 11; it must lie within the prompt's 10 tokens"),
        ([(-1, 4)], r"spans\[0\] is -1 to 4"),
        ([(4, 3)], r"spans\[0\] is 4 to 3"),
        ([(4, 4)], r"spans\[0\] is empty"),
        ([(4,)], r"spans\[0\] is \(4,\); it must be a pair"),
        ([("a", 4)], r"spans\[0\] is \('a', 4\)"),
        ([(0.0, 4)], r"spans\[0\] is \(0.0, 4\)"),
        ([7], r"spans\[0\] is 7"),
        ("0-4", "spans is '0-4'; it must be a list"),
        (7, "spans is 7; it must be a list"),
        ({"a": 1}, "it must be a list"),
    ],
)
def test_a_range_that_makes_no_sense_is_named(ranges: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        of_ranges(ranges, 10)


def keys_of(namespace: Namespace, tokens: list[int]) -> set[bytes]:
    """Of all prefixes."""
    prompts = (namespace.prompt(tokens[:end]) for end in range(1, len(tokens) + 1))
    hashes = b"".join(prompt.chain + prompt.tails for prompt in prompts)
    return {
        make_key(namespace.digest, hashes[at : at + HASH_BYTES], 0, 0)
        for at in range(0, len(hashes), HASH_BYTES)
    }


@settings(max_examples=50)
@given(Texts, st.integers(0, 40), st.integers(1, 40), st.sampled_from(["exact", "lossy", "other"]))
def test_no_prompt_has_a_key_of_a_span(tokens: list[int], start: int, size: int, kind: str) -> None:
    space = {
        "exact": SPACE,
        "lossy": SPACE.allowing_loss(max_error=1.0),
        "other": SPACE.narrowed(tags=[("is_of_spans", "True"), ("spans", "1")]),
    }[kind]
    prompt = SPACE.prompt(tokens)
    for span in of_ranges([(start, start + size)] if start + size <= len(tokens) else [], 40):
        one = span_prompt(prompt, span)
        found = keys_of(one.namespace, list(one.tokens))
        assert all(allows_loss(key) for key in found)
        assert not found & keys_of(space, tokens)
        assert not found & keys_of(space, tokens[span.start :])


def test_a_span_has_one_name_wherever_it_stands_and_each_model_its_own() -> None:
    text = list(range(100, 111))
    first = span_prompt(SPACE.prompt(text), Span(0, 11)).query()
    later = span_prompt(SPACE.prompt([1, 2, 3, *text, 4]), Span(3, 14)).query()
    assert first == later
    assert first.tenant == "me"
    other = Namespace("other", LAYOUT, cache_salt="a")
    assert span_prompt(other.prompt(text), Span(0, 11)).query().namespace != first.namespace
    assert SPACE.of_spans.of_spans == SPACE.of_spans
    assert SPACE.of_spans.is_of_spans and not SPACE.is_of_spans
    assert allows_loss(SPACE.of_spans.digest) and not allows_loss(SPACE.digest)


@given(st.text(), st.booleans())
def test_a_digest_shows_if_it_is_of_spans_and_gives_theirs(model: str, lossy: bool) -> None:
    space = Namespace(model, LAYOUT)
    space = space.allowing_loss(max_bits=4) if lossy else space
    assert not is_span(space.digest) and is_span(space.of_spans.digest)
    assert allows_loss(space.digest) == lossy
    assert spans_of(space.digest) == space.of_spans.digest == spans_of(space.of_spans.digest)


def test_inserts_go_with_their_span() -> None:
    image, text = Insert(5, 2, "image"), np.arange(12)
    prompt = SPACE.prompt(text, inserts=[image, Insert(9, 1, "other")])
    span = span_prompt(prompt, Span(4, 8))
    assert span.inserts == (Insert(1, 2, "image"),)
    plain = span_prompt(SPACE.prompt(text), Span(4, 8))
    assert span.chain != plain.chain
    with pytest.raises(ValueError, match="cuts an insert at 5 to 7"):
        span_prompt(prompt, Span(6, 8))
    with pytest.raises(ValueError, match="extras"):
        span_prompt(SPACE.prompt(text, {0: b"x"}), Span(4, 8))


@pytest.mark.parametrize(
    ("group", "rope", "says"),
    [
        ({}, ROPE, ""),
        ({}, {"model_type": "llama", "head_dim": 16, "rope_theta": 1e4}, ""),
        ({"planes": 1, "heads": 1, "head_dim": 24}, Rope(24, 8, first=16), ""),
        ({"dtype": "int8"}, Rope(16, 0), ""),
        ({"attention": "sliding", "window": 8}, ROPE, "sliding attention.*8 tokens"),
        ({"attention": "state"}, ROPE, "a state, which depends on all tokens before"),
        ({"dtype": "float8_e4m3fn"}, ROPE, "float8_e4m3fn; keys of"),
        ({"head_dim": 8}, ROPE, "heads of 8 elements, its rope of 16"),
        (
            {"packing": "an-engine", "block_tokens": 2, "block_bytes": 64},
            ROPE,
            "packing 'an-engine'",
        ),
        ({}, {"model_type": "llama", "head_dim": 16}, "rope_theta is None"),
        (
            {},
            {"model_type": "qwen2_vl", "head_dim": 16, "rope_scaling": {"mrope_section": [2, 3]}},
            "mrope_section",
        ),
    ],
)
def test_models_whose_spans_cannot_be_reused_are_refused_with_the_reason(
    group: dict[str, Any], rope: Any, says: str
) -> None:
    layout = Layout((replace(FULL, **group),), tokens_per_chunk=4, tail_tokens=2)
    found = refusal(layout, rope)
    assert re.search(says, found) if says else not found
