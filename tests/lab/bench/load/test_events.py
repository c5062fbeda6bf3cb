"""A stream of events, however its bytes are cut, and what is made of it."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold_lab.bench.load.events import BadStream, EventLines, EventStream
from kvhold_lab.bench.load.work import Reply


def replied(*events: Any, content: Any = "text") -> Reply:
    """Events a second apart, the first at 1 s."""
    stream = EventStream(0.0, content=content)
    for number, event in enumerate(events, start=1):
        stream.add(event if isinstance(event, bytes) else json.dumps(event).encode(), float(number))
    return stream.reply(len(events) + 1.0)


def text(piece: str, finish: str | None = None, **others: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish, **others}]}


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


DATA = st.lists(
    st.binary(min_size=1, max_size=20).map(lambda data: data.hex().encode()), max_size=8
)


@given(
    DATA,
    st.lists(st.integers(1, 30), max_size=30),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n: a comment\n\n"]),
)
def test_events_are_the_same_however_the_bytes_are_cut(
    data: list[bytes], cuts: list[int], end: bytes
) -> None:
    sent = b"".join(b"data: " + piece + end for piece in data)
    lines, found, place = EventLines(), list[bytes](), 0
    for cut in [*cuts, len(sent)]:
        found += lines.feed(sent[place : place + cut])
        place += cut
    assert found == data


def test_an_event_without_an_end_is_given_up() -> None:
    lines = EventLines()
    for _ in range(16):
        assert lines.feed(b"x" * (1 << 20)) == []
    with pytest.raises(BadStream, match="more than 16 MiB"):
        lines.feed(b"x")


def test_times_and_tokens_of_completions() -> None:
    usage = {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    reply = replied(text("a"), text(""), text("b", "length"), usage, b"[DONE]")
    assert reply.error is None
    assert (reply.ttft_s, list(reply.gaps_s), reply.latency_s) == (1.0, [1.0, 1.0], 6.0)
    assert (reply.input_tokens, reply.output_tokens, reply.cached_tokens, reply.text) == (
        9,
        3,
        4,
        "ab",
    )


def test_a_last_event_without_a_token_is_none() -> None:
    assert list(replied(text("a"), text("b"), text("", "stop"), b"[DONE]").gaps_s) == [1.0]


def test_a_chat_begins_with_its_first_word_not_with_its_role() -> None:
    reply = replied(
        delta(role="assistant", content=""), delta(content="a"), delta("stop", content="b")
    )
    assert (
        reply.ttft_s,
        reply.text,
        reply.output_tokens,
        reply.input_tokens,
        reply.cached_tokens,
    ) == (2.0, "ab", 2, None, None)


def test_thinking_is_output_but_no_answer() -> None:
    reply = replied(delta(reasoning_content="hm"), delta("stop", content="b"))
    assert (reply.ttft_s, reply.text) == (1.0, "b")


def test_token_ids_are_the_content_where_they_are_asked() -> None:
    reply = replied(
        text("", token_ids=[5]), text("xy", "length", token_ids=[6, 7]), content="tokens"
    )
    assert (reply.content, reply.output_tokens, reply.error) == ([5, 6, 7], 3, None)
    assert replied(text("a", "length"), content="tokens").error == "no token ids"


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([text("a")], "cut short"),
        ([], "cut short"),
        ([b"[DONE]"], "no tokens"),
        ([text("", "stop")], "no tokens"),
        ([text("a"), {"error": {"message": "out of memory"}}, b"[DONE]"], "server error"),
    ],
)
def test_what_ends_badly_is_an_error_that_keeps_what_came(events: list[Any], error: str) -> None:
    reply = replied(*events)
    assert reply.error == error
    assert reply.ttft_s == (1.0 if events and events[0] == text("a") else None)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"choices": 3}',
        b'{"choices": [{"text": 3}]}',
        b'{"usage": {"prompt_tokens": "many"}}',
        b'{"choices": [{"text": "\xff"}]}',
        b'{"error": ' + b"[" * 100_000,
    ],
)
def test_what_is_no_event_is_a_bad_stream(data: bytes) -> None:
    with pytest.raises(BadStream):
        replied(data)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with suppress(BadStream):
        replied(data)
