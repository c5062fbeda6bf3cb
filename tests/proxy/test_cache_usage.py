"""A stream's usage is rewritten however its bytes arrive; large answers pass."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.proxy import cache_usage
from kvhold.proxy.cache_usage import PromptUsage, UsageRewriter

USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}
REWRITTEN = {
    "input_tokens": 5,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
}


def rewriter() -> UsageRewriter:
    return UsageRewriter("messages", 1, PromptUsage())


def passed(
    rewrite: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]], pieces: Sequence[bytes]
) -> list[bytes]:
    async def source() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def read() -> list[bytes]:
        return [piece async for piece in rewrite(source())]

    return asyncio.run(read())


def split(text: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 400), max_size=40))
def test_events_are_rewritten_however_they_are_split(line: str, places: list[int]) -> None:
    around = [
        f'data: {{"text": "é\\n{line!r}"}}',
        ": a comment",
        "data: [DONE]",
        'data: {"usage": 1',
    ]
    usage = "event: message_delta" + line + "data: " + json.dumps({"a": 1.0, "usage": USAGE})
    end = line * 2
    sent = end.join([*around[:2], usage, *around[2:]]).encode()
    got = b"".join(passed(rewriter().events, split(sent, places))).decode()
    found = got.split(end)
    assert [*found[:2], *found[3:]] == around
    assert json.loads(found[2].split("data: ")[1]) == {"a": 1.0, "usage": REWRITTEN}


def test_events_pass_as_soon_as_they_are_whole() -> None:
    assert passed(rewriter().events, [b"data: a\n", b"\ndata: b", b"\n\ndata: c\n\nd", b"e"]) == [
        b"data: a\n\n",
        b"data: b\n\ndata: c\n\n",
        b"de",
    ]


def test_what_is_too_large_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_usage, "_MOST_HELD_BYTES", 100)
    event = b"data: " + json.dumps({"pad": "x" * 100, "usage": USAGE}).encode()
    assert b"".join(passed(rewriter().events, split(event, range(0, 200, 10)))) == event
    answer = json.dumps({"pad": "x" * 100, "usage": USAGE}).encode()
    assert b"".join(passed(rewriter().whole, split(answer, range(0, 200, 10)))) == answer
    small = json.dumps({"usage": USAGE}).encode()
    assert json.loads(b"".join(passed(rewriter().whole, [small]))) == {"usage": REWRITTEN}
