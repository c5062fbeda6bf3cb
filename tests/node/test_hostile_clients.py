"""Clients that do not speak the protocol, speak it wrongly or never stop: refused and counted,
while the node serves the others.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from kvhold.net import messages as m
from kvhold.net.messages import MAX_MESSAGE_BYTES
from kvhold.net.offsets import unpack
from kvhold.net.wire import encode
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, read, store
from tests.node.nodes import NOTHING, SPACE, RawClient, RunningNode, eventually, held_by

HELLO = bytes(encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "raw", 1)))


def counter(client: NodeClient, name: str) -> float:
    return client.status()["counters"].get(name, 0)


def own_memory(node: RunningNode) -> int:
    memory = psutil.Process(node.pid).memory_info()
    return int(memory.rss - memory.shared)


@pytest.fixture
def client(shared_node: RunningNode) -> Iterator[NodeClient]:
    """One that behaves. Whatever the others do, it is served, and nothing of theirs stays."""
    with shared_node.client() as client:
        client.register(SPACE)
        store(client, a_prompt(SPACE, 64))
        yield client
        assert read(client, a_prompt(SPACE, 64)) == 64
        eventually(lambda: len(client.status()["clients"]) == 1)
        assert held_by(client) == NOTHING
        client.clear()
        assert client.status()["used_bytes"] == 0


STRANGERS = {
    "garbage": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "bad message", "announced"),
    "four-gigabytes": (b"\xff\xff\xff\xff", "bad message", "4294967295"),
    "no-length": (b"\x00\x00\x00\x00", "bad message", "0 bytes"),
    "too-long-by-one": (
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
        "bad message",
        str(MAX_MESSAGE_BYTES + 1),
    ),
    "not-msgpack": (b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1", "bad message", "not a message"),
    "too-deep": (b"\xbf\x0b\x00\x00\x96\xa5Hello" + b"\x91" * 3000, "bad message", "not a message"),
    "a-long-hello": (
        bytes(encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "x" * 4096, 1))),
        "bad message",
        "1 to 4096 are allowed",
    ),
    "no-hello": (bytes(encode(m.Ping())), "bad message", "not a message"),
    "another-protocol": (
        bytes(encode(m.Hello("redis", 1, "x", 1))),
        "bad message",
        "must be a kvhold Hello",
    ),
    "another-version": (
        bytes(encode(m.Hello(m.MAGIC, 99, "x", 1))),
        "version",
        f"protocol {m.PROTOCOL_VERSION}, the client 99",
    ),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_who_does_not_greet_properly_is_told_why_and_hung_up_on(
    shared_node: RunningNode, client: NodeClient, stranger: str
) -> None:
    said, kind, reason = STRANGERS[stranger]
    errors, refused = (
        f"kvhold_protocol_errors{{reason={kind}}}",
        "kvhold_connections{result=refused}",
    )
    before = counter(client, errors), counter(client, refused)
    with RawClient(shared_node.path) as raw:
        raw.socket.sendall(said)
        answer = raw.hear()
        assert isinstance(answer, m.Refused)
        assert answer.fatal
        assert reason in answer.reason
        assert raw.is_closed()
    assert (counter(client, errors), counter(client, refused)) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize(
    "said",
    [
        HELLO,
        b"\x03\x00\x00\x00\xc1\xc1\xc1",
        b"\x0b\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\xc1\xc1\xc1",
        b"\x08\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        bytes(encode(m.Done(), 2)),
    ],
    ids=["a second hello", "no number", "garbage", "a number alone", "four gigabytes", "an answer"],
)
def test_a_client_that_falls_out_of_the_protocol_is_lost(
    shared_node: RunningNode, client: NodeClient, said: bytes
) -> None:
    lost = counter(client, "kvhold_connections{result=lost}")
    with RawClient(shared_node.path, greet=True) as raw:
        assert raw.ask(m.Ping()) == m.Done()
        raw.socket.sendall(raw.encoded(m.Ping()) + said + raw.encoded(m.Ping()))
        assert raw.hear() == m.Done(), "what came before was answered"
        assert isinstance(raw.hear(), m.Refused)
        assert raw.answered == 0, "it answers no request"
        assert raw.is_closed()
    assert counter(client, "kvhold_connections{result=lost}") == lost + 1


def test_who_never_greets_or_never_finishes_is_hung_up_on(
    shared_node: RunningNode, client: NodeClient
) -> None:
    before = counter(client, "kvhold_protocol_errors{reason=no hello}")
    with RawClient(shared_node.path) as silent, RawClient(shared_node.path) as half:
        half.socket.sendall(HELLO[:-3])
        assert read(client, a_prompt(SPACE, 64)) == 64
        for raw in (silent, half):
            assert raw.hear() == m.Refused("no Hello", fatal=True)
            assert raw.is_closed()
    assert counter(client, "kvhold_protocol_errors{reason=no hello}") == before + 2


def test_half_messages_cost_at_most_what_one_message_may_have(
    shared_node: RunningNode, client: NodeClient
) -> None:
    before = own_memory(shared_node)
    raws = [RawClient(shared_node.path, greet=True) for _ in range(4)]
    for raw in raws:
        raw.socket.sendall(MAX_MESSAGE_BYTES.to_bytes(4, "little") + bytes(MAX_MESSAGE_BYTES - 1))
    assert read(client, a_prompt(SPACE, 64)) == 64
    assert own_memory(shared_node) < before + 4 * 2 * MAX_MESSAGE_BYTES + (8 << 20)
    for raw in raws:
        raw.socket.close()
    eventually(lambda: own_memory(shared_node) < before + (8 << 20))


def test_who_does_not_read_its_answers_is_hung_up_on_before_they_fill_the_memory(
    shared_node: RunningNode, client: NodeClient
) -> None:
    before, unread = (
        own_memory(shared_node),
        counter(client, "kvhold_protocol_errors{reason=answers not read}"),
    )
    with ExitStack() as crowd:
        for _ in range(60):  # each makes the answer longer
            crowd.enter_context(RawClient(shared_node.path, greet=True))
        raw = crowd.enter_context(RawClient(shared_node.path, greet=True))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            ask_for_ever(raw)
    assert counter(client, "kvhold_protocol_errors{reason=answers not read}") == unread + 1
    eventually(lambda: own_memory(shared_node) < before + (32 << 20))


def ask_for_ever(raw: RawClient) -> None:
    question = bytes(encode(m.Status(), 1)) * 100
    while True:
        raw.socket.sendall(question)


def test_a_client_that_hangs_up_in_the_middle_of_a_message_leaves_nothing(
    shared_node: RunningNode, client: NodeClient
) -> None:
    with RawClient(shared_node.path, greet=True) as raw:
        raw.ask(m.Reserve(PLAIN.fingerprint, a_prompt(SPACE, 64, 1).chunks(), 0))
        raw.socket.sendall(raw.encoded(m.Commit(1, list(range(1000)), b""))[:-1])
    eventually(lambda: held_by(client) == NOTHING)


def test_memory_of_a_client_that_broke_the_rules_while_requests_waited_comes_back_when_it_leaves(
    shared_node: RunningNode, client: NodeClient
) -> None:
    with RawClient(shared_node.path, greet=True) as raw:
        raw.ask(m.Reserve(PLAIN.fingerprint, a_prompt(SPACE, 64, 1).chunks(), 0))
        raw.socket.sendall(raw.encoded(m.Ping()) + raw.encoded(m.Ping()) + b"\xff\xff\xff\xff")
        assert raw.hear() == m.Done()
        assert isinstance(raw.hear(), m.Refused)
        assert held_by(client)["reservations"] == 1, "it may still be writing"
    eventually(lambda: held_by(client) == NOTHING)


@pytest.mark.parametrize("packed", [b"", bytes(8 * 4 - 1), bytes(8 * 4), bytes(8 * 4 * 2 + 8)])
def test_a_commit_needs_a_checksum_for_each_layer_of_each_chunk(
    shared_node: RunningNode, client: NodeClient, packed: bytes
) -> None:
    prompt = a_prompt(SPACE, 64, 77)
    client.register(SPACE)
    with RawClient(shared_node.path, greet=True) as raw:
        granted = raw.ask(m.Reserve(PLAIN.fingerprint, prompt.chunks(), 0))
        assert isinstance(granted, m.Granted)
        assert unpack(granted.offsets, 1, 4).shape == (1, 4)
        layers = PLAIN.groups[0].layers
        assert len(packed) != 8 * layers * 4
        answer = raw.ask(m.Commit(granted.reservation, [0, 1, 2, 3], packed))
        assert isinstance(answer, m.Refused)
        assert (
            f"checksums has {len(packed)} bytes for 4 chunks; {8 * layers * 4} are needed"
            in answer.reason
        )
    eventually(lambda: held_by(client) == NOTHING)
    assert client.lookup(prompt.query()).num_tokens == 0, "nothing of it was committed"


def test_a_client_that_hangs_up_without_waiting_for_the_welcome_is_no_fault(
    shared_node: RunningNode, client: NodeClient
) -> None:
    for _ in range(20):
        with RawClient(shared_node.path) as raw:
            raw.socket.sendall(HELLO)
        with RawClient(shared_node.path) as raw:
            raw.socket.shutdown(socket.SHUT_RD)
            raw.socket.sendall(HELLO)


def test_what_one_client_holds_no_other_can_give_away(
    shared_node: RunningNode, client: NodeClient
) -> None:
    prompt = a_prompt(SPACE, 64)
    with RawClient(shared_node.path, greet=True) as raw, client.lookup(prompt.query()) as hit:
        reservation = client.reserve(PLAIN, a_prompt(SPACE, 64, 1).chunks())
        for number in range(hit.ticket, hit.ticket + 3):
            for message in (
                m.Release(number),
                m.Abandon(number),
                m.Commit(number, [0, 1, 2, 3], b""),
            ):
                assert isinstance(raw.ask(message), m.Done)
        assert held_by(client) == {"tickets": 1, "leases": 0, "reservations": 1}
        reservation.close()


def test_a_name_without_end_is_cut(shared_node: RunningNode, client: NodeClient) -> None:
    with RawClient(shared_node.path) as raw:
        raw.say(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "x" * 4_000, 1))
        assert isinstance(raw.hear(), m.Welcome)
        names = [c["name"] for c in client.status()["clients"]]
        assert sorted(map(len, names)) == [len("test"), 100]


def test_requests_sent_together_are_answered_each_with_its_number(
    shared_node: RunningNode, client: NodeClient
) -> None:
    with RawClient(shared_node.path, greet=True) as raw:
        questions = [
            m.Ping(),
            m.Claim(0, 0, 0),
            m.Lookup(a_prompt(SPACE, 64, 5).query()),
            m.Status(),
        ] * 50
        raw.socket.sendall(b"".join(map(raw.encoded, questions)))
        answers, numbers = zip(*((raw.hear(), raw.answered) for _ in questions), strict=True)
        assert list(numbers) == list(range(1, 1 + len(questions)))
        assert [type(answer) for answer in answers] == [
            m.Done,
            m.NotFound,
            m.LookupAnswer,
            m.Report,
        ] * 50
