"""An answer that comes too late is a miss for its caller.

It costs neither the connection nor memory, and holds up nobody else.
"""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.api import ReencodeProgress
from kvhold.core.errors import DeadlineExceeded, NodeError
from kvhold.core.keys import HASH_BYTES, ChunkNames
from kvhold.net import messages as m
from kvhold.net.wire import LENGTH_BYTES, body_length, encode
from kvhold.node import NodeClient
from kvhold.node.link import Link
from kvhold.testing.cache import PLAIN, a_prompt, check, flood, read, store
from tests.node.nodes import (
    NOTHING,
    PATIENT,
    PATIENT_S,
    SPACE,
    FakeNode,
    RunningNode,
    bytes_of,
    eventually,
    filled_reservation,
    held_by,
    set_deadlines,
)

WELCOME = bytes(encode(m.Welcome(m.PROTOCOL_VERSION, "0", 1, 2 << 20, False)))


def test_a_late_answer_costs_neither_the_connection_nor_what_its_client_holds(
    node: RunningNode,
) -> None:
    clients = [node.client(name=f"engine {number}") for number in range(4)]
    clients[0].register(SPACE)
    store(clients[0], a_prompt(SPACE, 64, 2))
    with clients[0].lookup(a_prompt(SPACE, 64, 2).query()) as hit:
        lease = clients[1].claim(hit.ticket)
    assert lease is not None
    reservation, written = filled_reservation(clients[2], 64, 1)
    links = [client._link for client in clients]

    with node.stopped():  # as a command that takes long
        for client in clients:
            with pytest.raises(DeadlineExceeded):
                client.lookup(a_prompt(SPACE, 64, 2).query(), deadline_s=0.05)

    assert [client.status()["pid"] for client in clients] == [node.pid] * 4
    assert [client._link for client in clients] == links, "nobody had to join again"
    flood(clients[3], SPACE)
    check(lease, a_prompt(SPACE, 64, 2), 64)
    assert (bytes_of(reservation) == written).all()
    reservation.commit()
    reservation.close()
    lease.close()
    assert read(clients[3], a_prompt(SPACE, 64, 1)) == 64
    eventually(lambda: held_by(clients[0]) == NOTHING)


def test_what_a_late_answer_granted_is_given_back(node: RunningNode) -> None:
    client, other = node.client(), node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64, 1))
    with other.lookup(a_prompt(SPACE, 64, 1).query()) as hit:
        with node.stopped():
            with pytest.raises(DeadlineExceeded):
                client.lookup(a_prompt(SPACE, 64, 1).query(), deadline_s=0.05)
            with pytest.raises(DeadlineExceeded):
                client.claim(hit.ticket, deadline_s=0.05)
            with pytest.raises(DeadlineExceeded):
                client.reserve(PLAIN, a_prompt(SPACE, 64, 2).chunks(), deadline_s=0.05)
        # all three are answered, and what they granted is back
        eventually(lambda: client._link is not None and not client._link.has_loose_ends)
        assert held_by(other) == {"tickets": 1, "leases": 0, "reservations": 0}
    assert store(other, a_prompt(SPACE, 64, 2)) == [0, 1, 2, 3], "nobody writes it"


def test_what_is_closed_while_the_node_is_silent_is_given_back_when_it_speaks(
    node: RunningNode,
) -> None:
    client, other = node.client(), node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64, 1))
    hit = client.lookup(a_prompt(SPACE, 64, 1).query())
    lease = client.claim(hit.ticket)
    reservation = client.reserve(PLAIN, a_prompt(SPACE, 64, 2).chunks())
    assert lease is not None
    set_deadlines(client, call_timeout_s=0.05)
    with node.stopped():
        for held in (hit, lease, reservation):
            held.close()
        with pytest.raises(NodeError, match="has not answered for"):
            client.lookup(a_prompt(SPACE, 64, 1).query())
    eventually(lambda: held_by(other) == NOTHING)


def test_requests_that_the_node_does_not_read_are_forgotten_or_sent_whole(
    node: RunningNode,
) -> None:
    client = node.client()
    client.register(SPACE)
    long = ChunkNames(SPACE.digest, bytes(HASH_BYTES * 200_000))  # more than a socket takes
    with node.stopped():
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                client.reserve(PLAIN, long, deadline_s=0.05)
    store(client, a_prompt(SPACE, 64, 1))
    assert read(client, a_prompt(SPACE, 64, 1)) == 64
    eventually(lambda: held_by(client) == NOTHING)


def test_calls_of_several_threads_are_under_way_at_once(tmp_path: Path) -> None:
    """A node that answers the second request, and the first one only when the second caller has its
    answer.
    """
    second_is_answered = threading.Event()
    begun = threading.Event()

    def heard(connection: socket.socket) -> None:
        begun.set()

    def answer_both(connection: socket.socket) -> None:
        connection.sendall(encode(m.Done(), 2))
        second_is_answered.wait()
        connection.sendall(encode(m.Report({"first": True}), 1))

    with (
        FakeNode(tmp_path / "s", [WELCOME, heard, answer_both]),
        NodeClient(tmp_path / "s", PATIENT) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(client.status)
        begun.wait()
        client.ping()
        second_is_answered.set()
        assert dict(first.result()) == {"first": True}


def test_a_late_answer_that_comes_in_pieces_is_read_to_its_end(tmp_path: Path) -> None:
    data = bytes(encode(m.Report({"late": True}), 1))

    def begin(connection: socket.socket) -> None:
        connection.sendall(data[:7])

    def finish(connection: socket.socket) -> None:
        connection.sendall(data[7:] + bytes(encode(m.Report({"late": False}), 2)))

    assert body_length(data) + LENGTH_BYTES == len(data)
    with (
        FakeNode(tmp_path / "s", [WELCOME, begin, finish]),
        NodeClient(tmp_path / "s", PATIENT) as client,
    ):
        with pytest.raises(DeadlineExceeded):
            client.status(deadline_s=0.05)
        assert client.connected
        assert dict(client.status()) == {"late": False}


def test_a_late_answer_to_a_question_gives_back_nothing_that_its_caller_has(tmp_path: Path) -> None:
    """A reencoding that is asked how far it is, and a hit that is asked how far it goes, stay the
    caller's.
    """
    questions_are_late = threading.Event()

    def answer_late(connection: socket.socket) -> None:
        questions_are_late.wait()
        connection.sendall(
            bytes(encode(m.ReencodeStatus(77, ReencodeProgress(seen=5)), 1))
            + bytes(encode(m.LookupAnswer(99, 100, arriving=True), 2))
        )

    with FakeNode(tmp_path / "s", [WELCOME, answer_late]):
        link = Link(tmp_path / "s", "test", PATIENT_S)
        for question in (m.Progress(77), m.Refresh(99, settle=False)):
            with pytest.raises(DeadlineExceeded):
                link.call(question, 0.05)
        questions_are_late.set()
        link.tend(PATIENT_S)
        assert not link.has_loose_ends, "nothing is to be returned"
        link.retire()


def test_closing_ends_the_calls_that_wait_though_the_arena_is_still_held(tmp_path: Path) -> None:
    """The node can write to the socket until the arena is let go of, or it would take the memory
    back too early.
    """
    is_asked, is_closed = threading.Event(), threading.Event()
    said = list[str]()

    def speak_later(connection: socket.socket) -> None:
        is_asked.set()
        is_closed.wait()
        connection.sendall(encode(m.News(), 0))
        said.append("news")

    with FakeNode(tmp_path / "s", [WELCOME, speak_later]), ThreadPoolExecutor(1) as threads:
        link = Link(tmp_path / "s", "test", PATIENT_S)
        link.hold()
        call = threads.submit(link.call, m.Ping(), PATIENT_S)
        is_asked.wait()
        link.retire()
        with pytest.raises(ConnectionError, match="closed"):
            call.result()
        is_closed.set()
        eventually(lambda: said)
        link.let_go()


class InterruptedOnce:
    """A lock whose owner is interrupted as it lets go of it, the first time that it has just become
    the reader.
    """

    def __init__(self, link: Link) -> None:
        self.link: Link | None = link
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *why: Any) -> None:
        self.release()
        if self.link is not None and self.link._reader is not None:
            self.link = None
            raise KeyboardInterrupt


def test_a_caller_that_is_interrupted_as_it_begins_to_read_leaves_the_reading_to_others(
    tmp_path: Path,
) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(bytes(encode(m.Done(), 1)) + bytes(encode(m.Done(), 2)))

    is_asked = threading.Event()

    def hear(connection: socket.socket) -> None:
        is_asked.set()

    with FakeNode(tmp_path / "s", [WELCOME, hear, answer]):
        link = Link(tmp_path / "s", "test", PATIENT_S)
        link._lock = InterruptedOnce(link)  # type: ignore[assignment]
        link._change = threading.Condition(link._lock)
        with pytest.raises(KeyboardInterrupt):
            link.call(m.Ping(), PATIENT_S)
        is_asked.wait()
        assert link.call(m.Ping(), PATIENT_S) == m.Done()
        link.retire()


class Interrupting:
    """A socket whose user is interrupted just when a part of what it sends is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, data: memoryview) -> int:
        self._socket.send(data[:5])
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def test_a_caller_that_is_interrupted_as_it_sends_costs_the_connection_and_no_request_is_sent_twice(
    tmp_path: Path,
) -> None:
    with FakeNode(tmp_path / "s", [WELCOME]):
        link = Link(tmp_path / "s", "test", PATIENT_S)
        link._socket = Interrupting(link._socket)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            link.call(m.Ping(), PATIENT_S)
        assert link.is_broken
        with pytest.raises(ConnectionError, match="cut short while it sent"):
            link.call(m.Ping(), PATIENT_S)
        link.retire()
