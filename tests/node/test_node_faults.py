"""The node dies, hangs, comes back or is somebody else; its clients go on, and whatever they read
or write stays theirs.
"""

import fcntl
import gc
import os
import socket
import termios
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from kvhold.core.config import ClientConfig
from kvhold.core.errors import DeadlineExceeded, KVHoldError, NodeError, ProtocolError
from kvhold.core.keys import Namespace
from kvhold.net import messages as m
from kvhold.net.wire import encode
from kvhold.node import NodeClient
from kvhold.testing.cache import HYBRID, a_prompt, check, flood, read, store
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
    works,
)

WELCOME = bytes(encode(m.Welcome(m.PROTOCOL_VERSION, "0", 1, 2 << 20, False)))


def test_a_killed_node_takes_nothing_from_under_its_clients_and_they_join_the_next_one(
    start_node: Callable[..., RunningNode],
) -> None:
    first = start_node()
    hybrid = Namespace(model="model", layout=HYBRID)
    leased, unclaimed = a_prompt(SPACE, 64, 1), a_prompt(SPACE, 64, 2)
    client = first.client()
    client.register(SPACE)
    client.register(hybrid)
    for prompt in (leased, unclaimed):
        store(client, prompt)
    hits = [client.lookup(prompt.query()) for prompt in (leased, unclaimed)]
    lease = client.claim(hits[0].ticket)
    assert lease is not None
    reservation, written = filled_reservation(client, 64, 3)

    first.kill()
    before = time.monotonic()
    for call in (
        client.status,
        reservation.commit,
        lambda: client.claim(hits[1].ticket),
        lambda: client.lookup(leased.query()),
    ):
        with pytest.raises(NodeError):
            call()
    assert time.monotonic() - before < PATIENT_S / 2, "nobody waits for a node that is gone"
    check(lease, leased, 64)
    assert (bytes_of(reservation) == written).all()

    assert first.path.is_socket(), "left behind, and no hindrance"
    second = start_node()
    eventually(lambda: works(client))
    assert client.status()["pid"] == second.pid
    assert held_by(client) == NOTHING
    assert client.claim(hits[1].ticket) is None, "a ticket of the node that is gone"
    assert read(client, leased) == 0
    for space in (SPACE, hybrid):  # known to the new node, though only the old one was told
        store(client, a_prompt(space, 90))
        assert read(client, a_prompt(space, 90)) == 90
    flood(client, SPACE)
    check(lease, leased, 64)
    assert (bytes_of(reservation) == written).all(), "the new arena is other memory"
    for holding in (*hits, lease, reservation):
        holding.close()
    assert held_by(client) == NOTHING


def test_a_layout_registered_while_there_is_no_node_is_known_to_the_next_one(
    start_node: Callable[..., RunningNode],
) -> None:
    first = start_node()
    client = first.client()
    first.kill()
    with pytest.raises(NodeError):
        client.register(SPACE)
    start_node()
    eventually(lambda: works(client))
    assert read(client, a_prompt(SPACE, 64)) == 0


def test_a_node_that_hangs_costs_one_deadline_and_is_used_again_when_it_answers(
    node: RunningNode,
) -> None:
    client = node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64))
    hit = client.lookup(a_prompt(SPACE, 64).query())
    set_deadlines(client, call_timeout_s=0.2)
    with node.stopped():
        before = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"status.*0\.3 s"):
            client.status(deadline_s=0.3)
        assert 0.3 <= time.monotonic() - before < PATIENT_S / 2
        before = time.monotonic()
        for call in (
            client.status,
            lambda: client.claim(hit.ticket),
            lambda: client.lookup(a_prompt(SPACE, 64).query()),
            client.clear,
        ) * 20:
            with pytest.raises(NodeError):
                call()
        hit.close()
        assert time.monotonic() - before < PATIENT_S / 2, "none of these waits"
        assert not client.connected
    set_deadlines(client, call_timeout_s=PATIENT_S)
    eventually(lambda: works(client))
    assert read(client, a_prompt(SPACE, 64)) == 64
    eventually(lambda: held_by(client) == NOTHING)


def test_an_idle_client_notices_by_itself_that_its_node_is_gone(node: RunningNode) -> None:
    client = node.client(heartbeat_interval_s=0.05)
    assert client.connected
    node.kill()
    eventually(lambda: not client.connected)


def test_a_lost_connection_lets_go_of_the_arena_when_nobody_uses_it_any_more(
    node: RunningNode,
) -> None:
    gc.collect()  # arenas of other tests go with their last view
    before = _mappings()
    client = node.client()
    client.register(SPACE)
    reservation, _ = filled_reservation(client, 64, 1)
    assert _mappings() == before + 1
    node.kill()
    with pytest.raises(NodeError):
        client.status()
    assert _mappings() == before + 1
    reservation.close()
    del reservation
    eventually(lambda: _mappings() == before)


def _mappings() -> int:
    return sum("kvhold-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_closing_a_client_gives_back_what_it_held_and_unmaps_the_arena(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as other:
        client = shared_node.client()
        client.register(SPACE)
        store(client, a_prompt(SPACE, 64))
        hit = client.lookup(a_prompt(SPACE, 64).query())
        client.close()
        eventually(lambda: held_by(other) == NOTHING)
        eventually(lambda: len(other.status()["clients"]) == 1)
        hit.close()
        other.clear()


def test_there_is_no_node(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="nothing"):
        NodeClient(tmp_path / "nothing")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "file/below", "x" * 200):
        with pytest.raises(NodeError, match=r"no node runs on|cannot join a node"):
            NodeClient(tmp_path / name)


# A node that is not what it should be

GREETINGS = {
    "another version": (
        bytes(encode(m.Welcome(m.PROTOCOL_VERSION + 1, "9.9", 1, 2 << 20, False))),
        rf"9\.9.*speaks protocol {m.PROTOCOL_VERSION + 1}, this client {m.PROTOCOL_VERSION}",
    ),
    "a refusal": (
        bytes(encode(m.Refused("the client is too new", fatal=True))),
        "the client is too new",
    ),
    "another message": (bytes(encode(m.Done())), "not a message of this protocol"),
    "another record": (b"\x08\x00\x00\x00\x92\xa7Welcome"[:12], "not a message of this protocol"),
    "garbage": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "announced"),
    "four gigabytes": (b"\xff\xff\xff\xff", "4294967295"),
    "nothing": (b"", "closed|reset|Broken pipe"),
}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_what_greets_in_another_way_is_not_joined_and_the_error_says_why(
    tmp_path: Path, greeting: str
) -> None:
    data, reason = GREETINGS[greeting]
    with FakeNode(tmp_path / "s", [data] if data else []), pytest.raises(NodeError, match=reason):
        NodeClient(tmp_path / "s", ClientConfig(connect_timeout_s=PATIENT_S))


def test_a_node_that_does_not_greet_is_given_up_in_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        before = time.monotonic()
        with pytest.raises(NodeError, match="timed out"):
            NodeClient(tmp_path / "s", ClientConfig(connect_timeout_s=0.2))
        assert time.monotonic() - before < PATIENT_S / 2


ANSWERS = {
    "another kind": (bytes(encode(m.LookupAnswer(1, 1), 1)), ProtocolError),
    "another one's": (bytes(encode(m.Done(), 2)), ProtocolError),
    "without a number": (bytes(encode(m.Done())), ProtocolError),
    "garbage": (b"\x03\x00\x00\x00\xc1\xc1\xc1", ProtocolError),
    "four gigabytes": (b"\xff\xff\xff\xff", ProtocolError),
    "two": (bytes(encode(m.Done(), 1) * 2), ProtocolError),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_makes_no_sense_is_an_error_and_the_connection_is_not_used_again(
    tmp_path: Path, answer: str
) -> None:
    data, error = ANSWERS[answer]
    with (
        FakeNode(tmp_path / "s", [WELCOME, data]),
        NodeClient(tmp_path / "s", replace(PATIENT, reconnect_interval_s=PATIENT_S)) as client,
    ):
        set_deadlines(client, connect_timeout_s=0.5)
        with pytest.raises(error):
            client.clear(deadline_s=PATIENT_S)
        assert not client.connected
        with pytest.raises(NodeError, match="looking for it"):
            client.clear()


@pytest.mark.parametrize("text", ["short", "x" * 300_000], ids=["a short one", "a long one"])
def test_an_answer_that_comes_in_pieces_is_read(tmp_path: Path, text: str) -> None:
    data = encode(m.Report({"text": text}), 1)

    def in_pieces(connection: socket.socket) -> None:
        for start, end in pairwise((0, 1, 3, 4, 7, len(data) - 1, len(data))):
            connection.sendall(data[start:end])
            eventually(lambda: not _unread(connection))

    with (
        FakeNode(tmp_path / "s", [WELCOME, in_pieces]),
        NodeClient(tmp_path / "s", PATIENT) as client,
    ):
        assert dict(client.status()) == {"text": text}


def _unread(connection: socket.socket) -> int:
    """Bytes that were sent and that the other side has not read."""
    unread = array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, unread)
    return unread[0]


def test_an_answer_that_trickles_is_given_up_in_time(tmp_path: Path) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"\x00\x00\x10\x00")
        with suppress(OSError):
            while True:
                connection.sendall(b"\x00")
                time.sleep(0.001)

    with (
        FakeNode(tmp_path / "s", [WELCOME, trickle]),
        NodeClient(tmp_path / "s", replace(PATIENT, reconnect_interval_s=PATIENT_S)) as client,
    ):
        set_deadlines(client, call_timeout_s=0.3, connect_timeout_s=0.5)
        before = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.clear()
        assert time.monotonic() - before < PATIENT_S / 2


# Another user

nobody = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@nobody
def test_a_process_of_another_user_is_refused(shared_node: RunningNode) -> None:
    """It cannot even reach the socket; and where the file's mode is no hindrance, both ends look at
    who the other one is.
    """
    with shared_node.client() as client:
        assert shared_node.path.stat().st_mode & 0o777 == 0o600
        with _OpenToAll(shared_node.path):
            refused = client.status()["counters"].get(
                "kvhold_protocol_errors{reason=foreign user}", 0
            )
            assert (
                _as_nobody(lambda: _says(lambda: NodeClient(shared_node.path), "belongs to user 0"))
                == 0
            )
            assert _as_nobody(lambda: _is_refused_by_the_node(shared_node.path)) == 0
        assert (
            client.status()["counters"]["kvhold_protocol_errors{reason=foreign user}"]
            >= refused + 1
        )


class _OpenToAll:
    """The socket and every folder above it can be reached by anybody meanwhile."""

    def __init__(self, path: Path) -> None:
        self._modes = {p: p.stat().st_mode & 0o7777 for p in (path, *path.parents)}
        self._socket = path

    def __enter__(self) -> None:
        for path, mode in self._modes.items():
            if path == self._socket or not mode & 0o1:
                path.chmod(mode | (0o666 if path == self._socket else 0o111))

    def __exit__(self, *_: object) -> None:
        for path, mode in self._modes.items():
            if path.stat().st_mode & 0o7777 != mode:
                path.chmod(mode)


def _as_nobody(work: Callable[[], bool]) -> int:
    pid = os.fork()
    if not pid:
        status = 2
        try:
            os.setgid(65534)
            os.setuid(65534)
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _says(call: Callable[[], object], text: str) -> bool:
    try:
        call()
    except KVHoldError as error:
        return text in str(error)
    return False


def _is_refused_by_the_node(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        said = sock.recv(65536)
        return b"serves only user 0; you are user 65534" in said and sock.recv(1) == b""


@nobody
def test_the_node_of_another_user_is_not_joined(tmp_path: Path) -> None:
    """Somebody may have put a socket where ours is expected, to read what we store."""
    with _OpenToAll(tmp_path):
        tmp_path.chmod(0o777)
        ready, told = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trap:
                    trap.bind(str(tmp_path / "s"))
                    trap.listen()
                    os.write(told, b"!")
                    connection, _ = trap.accept()
                    os._exit(len(connection.recv(65536)))
            finally:
                os._exit(255)
        try:
            assert os.read(ready, 1) == b"!"
            with pytest.raises(NodeError, match="belongs to user 65534"):
                NodeClient(tmp_path / "s")
        finally:
            os.close(ready)
            os.close(told)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "nothing was said to it"


def test_a_node_does_not_grow_with_the_clients_that_came_and_went(shared_node: RunningNode) -> None:
    def rest(rounds: int) -> int:
        for _ in range(rounds):
            with shared_node.client() as client:
                client.register(SPACE)
                store(client, a_prompt(SPACE, 64))
                read(client, a_prompt(SPACE, 64))
        memory = psutil.Process(shared_node.pid).memory_info()
        return int(memory.rss - memory.shared)

    first = rest(20)
    assert rest(60) < first + (4 << 20)
    with shared_node.client() as client:
        client.clear()
        eventually(lambda: len(client.status()["clients"]) == 1)
    eventually(lambda: psutil.Process(shared_node.pid).num_fds() < 20)
