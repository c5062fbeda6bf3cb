"""Known blocks are found at any offset, and nothing else is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.blend import content
from kvhold.blend.content import Fingerprints, blocks
from kvhold.blend.spans import Span, span_prompt
from kvhold.core.keys import Insert, Namespace, Prompt
from kvhold.core.layout import Group, Layout

SIZE = 4
LAYOUT = Layout((Group(layers=1, planes=2, heads=1, head_dim=8, dtype="float16"),), SIZE)
SPACE = Namespace("model", LAYOUT)
Texts = st.lists(st.integers(-1, 2), max_size=60)


def known(*texts: list[int], space: Namespace = SPACE) -> Fingerprints:
    fingerprints = Fingerprints()
    for text in texts:
        for block in blocks(space.prompt(text), Span(0, len(text))):
            fingerprints.add(block)
    return fingerprints


def slowly(prompt: Prompt, names: set[bytes]) -> tuple[Span, ...]:
    spans, start = list[Span](), 0
    while start + SIZE <= prompt.num_tokens:
        if span_prompt(prompt, Span(start, start + SIZE)).chain in names:
            spans.append(Span(start, start + SIZE))
            start += SIZE
        else:
            start += 1
    return tuple(spans)


def names_of(fingerprints: Fingerprints) -> set[bytes]:
    return set(fingerprints._hashes.values())


@settings(max_examples=200)
@given(Texts, Texts)
def test_found_blocks_are_those_that_a_slow_search_finds(
    stored: list[int], text: list[int]
) -> None:
    fingerprints, prompt = known(stored), SPACE.prompt(text)
    assert fingerprints.find(prompt) == slowly(prompt, names_of(fingerprints))


def test_documents_in_another_order_at_odd_offsets_are_found_whole() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50_000, SIZE * 10).tolist() for _ in range(5)]
    fingerprints = known(*documents)
    text, places = [1, 2, 3], list[int]()
    for document in documents[::-1]:
        places.append(len(text))
        text += [*document, 7]
    spans = fingerprints.find(SPACE.prompt(text))
    assert [span.start for span in spans] == [
        place + SIZE * block for place in places for block in range(10)
    ]
    first = span_prompt(SPACE.prompt(text), spans[0]).query()
    assert first == blocks(SPACE.prompt(documents[-1]), Span(0, SIZE))[0].query()


def test_equal_fingerprints_of_other_tokens_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[int]()
    hash_at = content._hash_at

    def counted(prompt: Prompt, start: int, size: int) -> bytes:
        checked.append(start)
        return hash_at(prompt, start, size)

    monkeypatch.setattr(content, "_mixed", lambda values, key: np.zeros_like(values))
    monkeypatch.setattr(content, "_hash_at", counted)
    fingerprints = known([1, 2, 3, 4])
    assert fingerprints.find(SPACE.prompt([9, 1, 2, 3, 4, 9])) == (Span(1, 5),)
    checked.clear()
    assert fingerprints.find(SPACE.prompt([9] * 1000)) == ()
    assert len(checked) == 2 * 250 + 16, "the work is bounded"


def test_other_namespaces_have_other_blocks() -> None:
    other = Namespace("model", LAYOUT, cache_salt="other")
    text = [1, 2, 3, 4]
    fingerprints = known(text)
    assert fingerprints.find(other.prompt(text)) == ()
    for block in blocks(other.prompt(text), Span(0, SIZE)):
        fingerprints.add(block)
    assert len(fingerprints) == 2
    for space in (SPACE, other):
        assert fingerprints.find(space.prompt(text)) == (Span(0, 4),)


def test_the_block_unused_for_longest_is_forgotten() -> None:
    texts = [[i] * SIZE for i in range(4)]
    fingerprints = Fingerprints(max_blocks=2)

    def finds(text: list[int]) -> bool:
        return bool(fingerprints.find(SPACE.prompt(text)))

    for text in texts[:2]:
        fingerprints.add(span_prompt(SPACE.prompt(text), Span(0, SIZE)))
    assert finds(texts[0])
    fingerprints.add(span_prompt(SPACE.prompt(texts[2]), Span(0, SIZE)))
    assert [finds(text) for text in texts] == [True, False, True, False]
    assert len(fingerprints) == 2 == int(fingerprints._counts.sum())


def test_a_request_has_at_most_256_and_short_prompts_none() -> None:
    fingerprints = known([5] * SIZE)
    assert len(fingerprints.find(SPACE.prompt([5] * SIZE * 300))) == 256
    assert fingerprints.find(SPACE.prompt([5] * (SIZE - 1))) == ()
    assert Fingerprints().find(SPACE.prompt([])) == ()
    with pytest.raises(ValueError, match="a block has 3 tokens; it must have 4"):
        fingerprints.add(SPACE.prompt([1, 2, 3]))


def test_an_image_that_differs_is_no_match() -> None:
    text = [8, 8, 1, 2, 9]

    def prompt(digest: str) -> Prompt:
        return SPACE.prompt(text, inserts=[Insert(0, 2, digest)])

    fingerprints = Fingerprints()
    fingerprints.add(blocks(prompt("image"), Span(0, 4))[0])
    assert fingerprints.find(prompt("image")) == (Span(0, 4),)
    assert fingerprints.find(prompt("other")) == ()
    fingerprints.add(span_prompt(SPACE.prompt(text), Span(1, 5)))
    assert fingerprints.find(prompt("other")) == (), "it cuts the image"
