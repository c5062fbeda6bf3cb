"""Messages survive every way a stream can be cut, and bytes that are none are refused before they
cost anything.
"""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvhold.core.errors import ProtocolError
from kvhold.core.keys import ChunkNames, Query
from kvhold.core.layout import Group, Layout
from kvhold.net import messages as m
from kvhold.net.messages import MAX_MESSAGE_BYTES
from kvhold.net.wire import LENGTH_BYTES, Decoder, Splitter, body_length, encode

REQUESTS: Decoder[m.Request] = Decoder(m.Request)
ANSWERS: Decoder[m.Answer] = Decoder(m.Answer)

LAYOUT = Layout(
    groups=(
        Group(layers=2, planes=2, heads=4, head_dim=64, dtype="bfloat16", rotary="theta=1e6"),
        Group(
            layers=1, planes=1, heads=1, head_dim=8, dtype="float32", attention="sliding", window=5
        ),
    ),
    tokens_per_chunk=32,
    tail_tokens=8,
)

number = st.integers(-(2**63), 2**64 - 1)
rows = st.lists(st.binary(max_size=32), max_size=3)
requests = st.one_of(
    st.just(m.Register(LAYOUT)),
    st.builds(
        m.Lookup,
        st.builds(
            Query,
            st.binary(),
            st.binary(),
            number,
            st.binary(),
            st.binary(),
            st.lists(number).map(tuple),
        ),
    ),
    st.builds(m.Claim, number, number, number),
    st.builds(m.Release, number),
    st.builds(
        m.Reserve,
        st.binary(),
        st.builds(ChunkNames, st.binary(), st.binary(), number, number),
        number,
    ),
    st.builds(m.Commit, number, st.lists(number)),
    st.builds(m.Abandon, number),
    st.builds(m.Clear, st.none() | st.binary(), st.integers(0, 1 << 62)),
    st.builds(m.LastClear, st.binary()),
    st.sampled_from([m.Status(), m.Stop(), m.Ping()]),
)
answers = st.one_of(
    st.builds(m.LookupAnswer, number, number),
    st.builds(m.Leased, number, rows, st.lists(number)),
    st.builds(m.Granted, number, rows),
    st.builds(m.Report, st.dictionaries(st.text(), st.integers(0, 9) | st.text())),
    st.builds(m.Done, number, st.none() | number),
    st.builds(m.Refused, st.text(), st.booleans()),
    st.just(m.NotFound()),
)


@given(requests)
def test_a_request_comes_back_as_it_was(request: m.Request) -> None:
    assert REQUESTS.decode(encode(request)[LENGTH_BYTES:]) == request


@given(answers)
def test_an_answer_comes_back_as_it_was(answer: m.Answer) -> None:
    assert ANSWERS.decode(encode(answer)[LENGTH_BYTES:]) == answer


@given(st.lists(requests, max_size=6), st.data())
def test_however_a_stream_is_cut_the_same_messages_come_out(
    sent: list[m.Request], data: st.DataObject
) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter = Splitter()
    received: list[m.Request] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += map(REQUESTS.decode, splitter.feed(stream[start:end]))
    assert received == sent


def test_what_is_not_whole_yet_is_kept_when_the_reader_uses_its_memory_for_what_comes_next() -> (
    None
):
    stream, memory = (
        bytes(encode(m.Refused("one", False)) + encode(m.Refused("two", True))),
        bytearray(64),
    )
    splitter = Splitter()
    received: list[m.Answer] = []
    for at in range(0, len(stream), 7):
        piece = stream[at : at + 7]
        memory[: len(piece)] = piece
        received += map(ANSWERS.decode, splitter.feed(memoryview(memory)[: len(piece)]))
    assert received == [m.Refused("one", False), m.Refused("two", True)]


def test_a_stream_that_comes_byte_by_byte_is_read() -> None:
    sent = [m.Ping(), m.Commit(3, list(range(40)), bytes(320)), m.Status()]
    splitter = Splitter()
    assert [
        REQUESTS.decode(body)
        for byte in b"".join(map(encode, sent))
        for body in splitter.feed(bytes([byte]))
    ] == sent


def test_a_reader_that_stops_in_the_middle_gets_each_message_once() -> None:
    sent = [m.Release(i) for i in range(5)]
    splitter, received, stream = Splitter(), [], b"".join(map(encode, sent))
    while (body := next(iter(splitter.feed(stream)), None)) is not None:
        received.append(REQUESTS.decode(body))
        stream = b""
    assert received == sent


@pytest.mark.parametrize("length", [0, MAX_MESSAGE_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_that_is_not_allowed_is_refused_at_once_and_for_good(length: int) -> None:
    prefix = length.to_bytes(LENGTH_BYTES, "little")
    with pytest.raises(ProtocolError, match=str(length)):
        body_length(prefix)
    splitter = Splitter()
    bodies = splitter.feed(encode(m.Ping()) + prefix)
    assert REQUESTS.decode(next(bodies)) == m.Ping(), "what came before it is good"
    with pytest.raises(ProtocolError):
        next(bodies)
    with pytest.raises(ProtocolError):
        list(splitter.feed(encode(m.Ping())))


def test_the_longest_message_passes_and_one_byte_more_is_not_sent() -> None:
    frame = len(encode(m.Refused("x" * 70_000, True))) - LENGTH_BYTES - 70_000
    longest = m.Refused("x" * (MAX_MESSAGE_BYTES - frame), True)
    [body] = Splitter().feed(bytes(encode(longest)))
    assert len(body) == MAX_MESSAGE_BYTES
    assert ANSWERS.decode(body) == longest
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES + 1)):
        encode(m.Refused(longest.reason + "x", True))


@pytest.mark.parametrize(
    "message", [m.Claim(2**64, 0, 0), m.Hello("kvhold", 1, "\udcff", 1)], ids=["number", "text"]
)
def test_what_cannot_be_written_is_our_error(message: m.Request) -> None:
    with pytest.raises(ProtocolError):
        encode(message)


@given(st.binary(max_size=60))
@example(b"\x92\xa4Ping" + b"\x91" * 10_000)  # nested deeper than any reader goes
@example(b"\x93\xa6Commit\x01\xdd\xff\xff\xff\xff")  # a list of four billion
@example(b"\x93\xa6Commit\x01\xdd\x00\x00\x00\x02\x01")
@example(b"\x92\xa8Register\x93\x90\x01\x01")
@example(b"\x92\xa5Hello\xff")
def test_bytes_that_are_no_message_are_our_error_and_no_other(body: bytes) -> None:
    for decoder in (REQUESTS, ANSWERS):
        with suppress(ProtocolError):
            decoder.decode(body)


@given(requests, st.data())
def test_a_message_cut_short_or_followed_by_more_is_refused(
    request: m.Request, data: st.DataObject
) -> None:
    body = bytes(encode(request)[LENGTH_BYTES:])
    short = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:short], body + b"\xc0"):
        with pytest.raises(ProtocolError):
            REQUESTS.decode(wrong)


def test_one_sides_messages_are_not_the_others() -> None:
    with pytest.raises(ProtocolError):
        ANSWERS.decode(encode(m.Status())[LENGTH_BYTES:])
    with pytest.raises(ProtocolError):
        REQUESTS.decode(encode(m.NotFound())[LENGTH_BYTES:])


def test_a_layout_that_cannot_be_is_refused_with_its_reason() -> None:
    group = {"layers": 0, "planes": 2, "heads": 1, "head_dim": 1, "dtype": "int8"}
    body = msgspec.msgpack.encode(
        ["Register", {"groups": [group], "tokens_per_chunk": 16, "tail_tokens": 1}]
    )
    with pytest.raises(ProtocolError, match=r"group\.layers is 0"):
        REQUESTS.decode(body)
