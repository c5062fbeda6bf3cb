"""The state machine of a client's connection: bytes and events in, bytes and answers out."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.core.api import CopyProgress, ReencodeProgress, RetainAnswer
from kvhold.core.errors import ProtocolError
from kvhold.core.keys import ChunkNames, Query
from kvhold.net import messages as m
from kvhold.net.wire import Decoder, Splitter, encode, split_number
from kvhold.node.conversation import Call, Conversation

LOOKUP = m.Lookup(Query(bytes(32), bytes(16), 1, b""))
GRANTING = {
    LOOKUP: (m.LookupAnswer(7, 64), m.Release(7)),
    m.LookupSpans((LOOKUP.query, LOOKUP.query)): (
        m.SpansAnswer([m.LookupAnswer(0, 0), m.LookupAnswer(11, 64)]),
        m.Release(11),
    ),
    m.Claim(7, 0, 0): (m.Leased(8, [], [], []), m.Release(8)),
    m.Reserve(bytes(16), ChunkNames(bytes(32), b""), 0): (m.Granted(9, []), m.Abandon(9)),
    m.Reencode("disk", "raw"): (m.ReencodeStatus(10, ReencodeProgress()), m.Release(10)),
    m.Copy("disk", LOOKUP.query): (m.CopyStatus(12, CopyProgress()), m.Release(12)),
    m.Retain(LOOKUP.query, 60.0): (m.Retained(RetainAnswer(13, 64, 64)), m.Release(13)),
}
_requests: Decoder[m.Request] = Decoder(m.Request)


@dataclass
class Node:
    """Hears a conversation's bytes as requests, and answers those that the test picks."""

    conversation: Conversation
    heard: dict[int, Any] = field(default_factory=dict)  # requests by number, not answered yet
    all_heard: list[Any] = field(default_factory=list)
    splitter: Splitter = field(default_factory=Splitter)

    def take(self, most: int = 1 << 20) -> None:
        """So many of the bytes that are to be sent."""
        while most and (data := self.conversation.to_send()) is not None:
            some = bytes(data[:most])
            most -= len(some)
            self.conversation.sent(len(some))
            for body in self.splitter.feed(some):
                number, record = split_number(body)
                assert number not in self.heard
                self.heard[number] = _requests.decode(record)
                self.all_heard.append(self.heard[number])

    def say(self, answer: m.Message, number: int, now_s: float = 0.0) -> None:
        self.heard.pop(number, None)
        self.say_bytes(bytes(encode(answer, number)), now_s)

    def say_bytes(self, data: bytes, now_s: float = 0.0) -> None:
        for number, answer in self.conversation.read(data, now_s):
            self.conversation.deliver(number, answer)


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(0.0)


@pytest.fixture
def node(conversation: Conversation) -> Node:
    return Node(conversation)


def ask(
    conversation: Conversation, request: m.Message, *, keep: bool = False, now_s: float = 0.0
) -> Call:
    call = conversation.prepare(request, keep=keep)
    conversation.begin(call, now_s)
    return call


def test_answers_are_matched_to_calls_in_any_order(conversation: Conversation, node: Node) -> None:
    calls = [ask(conversation, m.Ping()) for _ in range(3)]
    node.take()
    for call in (calls[1], calls[2], calls[0]):
        node.say(m.Done(count=call.number), call.number)
    assert [call.answer for call in calls] == [m.Done(count=call.number) for call in calls]
    assert not conversation.has_loose_ends


def test_a_call_that_is_given_up_before_it_is_sent_is_never_sent(
    conversation: Conversation, node: Node
) -> None:
    given_up, other = ask(conversation, LOOKUP), ask(conversation, m.Ping())
    conversation.give_up(given_up)
    assert conversation.is_owed
    node.take()
    assert (node.all_heard, conversation.is_owed) == ([m.Ping()], False)
    node.say(m.Done(), other.number)
    assert other.answer == m.Done()


def test_a_call_that_is_given_up_in_the_middle_of_its_bytes_is_sent_whole(
    conversation: Conversation, node: Node
) -> None:
    call = ask(conversation, LOOKUP)
    ask(conversation, m.Ping())
    node.take(5)
    conversation.give_up(call)
    node.take()
    assert node.all_heard == [LOOKUP, m.Ping()]


def test_a_call_to_keep_is_sent_even_if_it_is_given_up(
    conversation: Conversation, node: Node
) -> None:
    call = ask(conversation, m.Release(7), keep=True)
    conversation.give_up(call)
    node.take()
    assert node.all_heard == [m.Release(7)]
    node.say(m.Done(), call.number)
    assert not conversation.has_loose_ends


def test_bytes_that_were_not_taken_are_offered_again(
    conversation: Conversation, node: Node
) -> None:
    call = ask(conversation, m.Ping())
    conversation.to_send()
    conversation.sent(0)  # the socket is full
    conversation.give_up(call)
    assert conversation.to_send() is None, "nothing of it was sent"


@pytest.mark.parametrize("request_", GRANTING, ids=lambda request: type(request).__name__)
def test_what_a_late_answer_granted_is_returned(
    conversation: Conversation, node: Node, request_: m.Message
) -> None:
    answer, its_return = GRANTING[request_]
    call = ask(conversation, request_)
    node.take()
    conversation.give_up(call)
    node.say(answer, call.number)
    node.take()
    assert node.all_heard == [request_, its_return]
    node.say(m.Done(), next(iter(node.heard)))
    assert not conversation.has_loose_ends


@pytest.mark.parametrize("request_", GRANTING, ids=lambda request: type(request).__name__)
def test_an_answer_whose_caller_was_interrupted_is_returned_once(
    conversation: Conversation, node: Node, request_: m.Message
) -> None:
    answer, its_return = GRANTING[request_]
    call = ask(conversation, request_)
    node.take()
    node.say(answer, call.number)
    conversation.give_up(call)
    conversation.give_up(call)
    node.take()
    assert node.all_heard == [request_, its_return]


@pytest.mark.parametrize(
    "answer",
    [
        m.LookupAnswer(0, 0),
        m.Granted(0, []),
        m.Retained(RetainAnswer(0, 0, 0)),
        m.NotFound(),
        m.Refused("no", fatal=False),
    ],
)
def test_a_late_answer_that_granted_nothing_is_dropped(
    conversation: Conversation, node: Node, answer: m.Message
) -> None:
    call = ask(conversation, LOOKUP)
    node.take()
    conversation.give_up(call)
    node.say(answer, call.number)
    assert not conversation.has_loose_ends


def test_a_late_answer_to_a_question_returns_nothing_that_its_caller_has(
    conversation: Conversation, node: Node
) -> None:
    calls = [
        ask(conversation, question) for question in (m.Progress(77), m.Refresh(99, settle=False))
    ]
    node.take()
    for call, answer in zip(
        calls,
        (m.ReencodeStatus(77, ReencodeProgress()), m.LookupAnswer(99, 64, arriving=True)),
        strict=True,
    ):
        conversation.give_up(call)
        node.say(answer, call.number)
    assert not conversation.has_loose_ends


def test_news_is_no_answer(conversation: Conversation, node: Node) -> None:
    call = ask(conversation, m.Ping())
    node.take()
    node.say(m.News(), 0)
    assert call.answer is None
    assert [conversation.take_news(), conversation.take_news()] == [True, False]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (bytes(encode(m.Done(), 99)), ProtocolError),
        (b"\xff" * 16, ProtocolError),
        (b"\x0a\x00\x00\x00" + b"\xc1" * 10, ProtocolError),
        (bytes(encode(m.Refused("it was kicked", fatal=True), 0)), ConnectionError),
    ],
    ids=["an answer to nothing", "no length", "no message", "a refusal of everything"],
)
def test_what_breaks_the_rules_ends_the_conversation(
    conversation: Conversation, node: Node, said: bytes, error: type[Exception]
) -> None:
    ask(conversation, m.Ping())
    node.take()
    node.say_bytes(said)
    assert type(conversation.error) is error
    first = conversation.error
    conversation.fail(ConnectionResetError("later"))
    assert conversation.error is first


def test_a_node_is_silent_from_the_last_that_it_said_while_it_owes_a_late_answer(
    conversation: Conversation, node: Node
) -> None:
    first = ask(conversation, m.Ping(), now_s=1.0)
    second = ask(conversation, m.Ping(), now_s=3.0)
    node.take()
    assert conversation.silent_s(5.0) == 0.0, "its caller waits for it"
    conversation.give_up(first)
    assert conversation.silent_s(5.0) == 4.0
    node.say(m.News(), 0, now_s=4.0)
    assert conversation.silent_s(5.0) == 1.0
    node.say(m.Done(), second.number, now_s=4.5)
    assert conversation.silent_s(5.0) == 0.5
    node.say(m.Done(), first.number, now_s=4.5)
    assert conversation.silent_s(5.0) == 0.0


_event = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("take"), st.integers(1, 80)),
    st.tuples(st.just("say"), st.integers(0, 10), st.integers(1, 40)),
    st.tuples(st.just("give up"), st.integers(0, 10)),
)


@given(st.lists(_event, max_size=60))
@settings(deadline=None)
def test_every_grant_is_its_callers_or_is_returned_once(events: list[Any]) -> None:
    """Whatever is cut, late or given up: each ticket that the node gives has one holder at the end,
    and each answer its own caller.
    """
    conversation = Conversation(0.0)
    node = Node(conversation)
    calls: list[Call] = []
    for what, *how in events:
        if what == "ask":
            calls.append(ask(conversation, LOOKUP if how[0] else m.Ping()))
        elif what == "take":
            node.take(how[0])
        elif what == "say" and node.heard:
            answer_one(node, sorted(node.heard)[how[0] % len(node.heard)], how[1])
        elif what == "give up" and calls:
            conversation.give_up(calls[how[0] % len(calls)])
    for call in calls[::2]:
        conversation.give_up(call)
    while conversation.has_loose_ends or node.heard:
        node.take()
        for number in sorted(node.heard):
            answer_one(node, number, 1 << 20)
    assert conversation.error is None
    returned = [request.number for request in node.all_heard if isinstance(request, m.Release)]
    granted = [call.answer.ticket for call in calls if isinstance(call.answer, m.LookupAnswer)]
    assert all(
        call.answer.ticket == call.number
        for call in calls
        if isinstance(call.answer, m.LookupAnswer)
    )
    assert sorted(returned) == sorted(
        call.number for call in calls if call.late and isinstance(call.answer, m.LookupAnswer)
    )
    assert len(set(granted)) == len(granted)
    assert all(call.answer is not None for call in calls if not call.late)


def answer_one(node: Node, number: int, piece: int) -> None:
    """Lookups get a ticket with their own number. The bytes come in pieces."""
    request = node.heard.pop(number)
    data = bytes(
        encode(m.LookupAnswer(number, 64) if isinstance(request, m.Lookup) else m.Done(), number)
    )
    for start in range(0, len(data), piece):
        node.say_bytes(data[start : start + piece])
