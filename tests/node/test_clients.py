"""Clients that die with children left, stall, are too many, or are ended by hand: what they held
goes back, and nobody else is hurt.
"""

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import cast

import psutil
import pytest

from kvhold.core.errors import NodeError, NodeRefused
from kvhold.net import messages as m
from kvhold.node import NodeClient
from kvhold.node.peers import SocketPeer
from kvhold.testing.cache import PLAIN, a_prompt, read, store
from tests.node.nodes import (
    NOTHING,
    PATIENT,
    PATIENT_S,
    SPACE,
    RawClient,
    RunningNode,
    bytes_of,
    clean_environ,
    eventually,
    filled_reservation,
    held_by,
    open_descriptors,
    run_kvhold,
    works,
)
from tests.node.test_client_faults import child

FORKS = """
import os, signal
held = [write_half(client, 64, 1)]
pid = {fork}
if not pid:
    signal.pause()
    os._exit(0)
print(pid, flush=True)
"""
# Python closes the child's copy of the socket; a fork by a library does not.
FORK_IN_C = "__import__('ctypes').CDLL(None).fork()"


@contextmanager
def forking(node: RunningNode, fork: str) -> Iterator[subprocess.Popen[str]]:
    """A client that is writing, with a child."""
    command = [sys.executable, "-c", FORKING.format(work=FORKS.format(fork=fork)), str(node.path)]
    environ = clean_environ(PYTHONPATH=os.pathsep.join(sys.path), PYTHONWARNINGS="ignore")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(forked, signal.SIGKILL)


FORKING = """
import signal, sys
from pathlib import Path
from kvhold.node import NodeClient
from tests.node.nodes import PATIENT, SPACE, write_half
client = NodeClient(Path(sys.argv[1]), PATIENT, name="child")
client.register(SPACE)
{work}
signal.pause()
"""


@pytest.mark.parametrize("fork", ["os.fork()", FORK_IN_C], ids=["by Python", "by a library"])
def test_a_killed_client_gives_back_what_it_held_though_a_child_of_it_lives(
    shared_node: RunningNode, fork: str
) -> None:
    with shared_node.client() as client, forking(shared_node, fork) as process:
        client.register(SPACE)
        assert held_by(client)["reservations"] == 1
        process.kill()
        eventually(lambda: held_by(client) == NOTHING)
        assert store(client, a_prompt(SPACE, 64, 1)) == [0, 1, 2, 3]
        client.clear()


# As the kernel does with a process that dies: it closes the socket, and other files later.
CLOSES = """
from kvhold.node.link import _links
held = [write_half(client, 64, 1)]
{first}
for link in list(_links):
    link._socket.shutdown(2)
"""


def test_memory_that_a_device_may_write_goes_back_when_its_process_has_ended(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client:
        client.register(SPACE)
        with child(shared_node, CLOSES.format(first="")):
            eventually(lambda: held_by(client) == NOTHING)
        with child(shared_node, CLOSES.format(first="client.map_for_device()")) as process:
            pid = process.pid
            # it has joined again
            eventually(
                lambda: [one.reservations for one in client.clients() if one.pid == pid] == [1, 0]
            )
            assert client._link is not None
            for one in client.clients():  # nobody departs for another process
                client._call(m.Departed(client._link.welcome.run, one.number), m.Done, None)
            assert held_by(client)["reservations"] == 1
            process.kill()
            eventually(lambda: held_by(client) == NOTHING)
        assert store(client, a_prompt(SPACE, 64, 1)) == [0, 1, 2, 3]
        client.clear()


def test_memory_that_a_device_may_write_goes_back_when_its_process_says_that_no_copy_is_under_way(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client, shared_node.client() as other:
        other.register(SPACE)
        other.map_for_device()
        reservation = other.reserve(PLAIN, a_prompt(SPACE, 64, 1).chunks())
        lost = other._link
        assert lost is not None
        lost._socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: other._link not in (lost, None))
        numbers = {one.number for one in client.clients()}
        assert lost.welcome.number in numbers
        assert held_by(client)["reservations"] == 1
        with RawClient(shared_node.path, greet=True) as raw:
            assert raw.ask(m.Departed(lost.welcome.run + 1, lost.welcome.number)) == m.Done(), (
                "of an earlier node"
            )
        assert held_by(client)["reservations"] == 1
        reservation.close()
        eventually(lambda: held_by(client) == NOTHING)
        assert lost.welcome.number not in {one.number for one in client.clients()}
        assert store(client, a_prompt(SPACE, 64, 1)) == [0, 1, 2, 3]
        client.clear()


def test_a_client_with_a_device_that_holds_nothing_leaves_at_once_and_leaves_no_descriptor(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client:
        before = len(list(Path(f"/proc/{shared_node.pid}/fd").iterdir()))
        for _ in range(3):
            with shared_node.client() as other:
                read_only, writable = other.map_for_device()
                other.map_for_device()
                other.report_pinned(4096, numa_node=0)
                assert [(one.device, one.pinned_bytes) for one in client.clients()] == [
                    (False, 0),
                    (True, 4096),
                ]
                assert (
                    read_only.size == writable.size
                    and writable.flags.writeable
                    and not read_only.flags.writeable
                )
        eventually(lambda: len(list(Path(f"/proc/{shared_node.pid}/fd").iterdir())) <= before)
        assert held_by(client) == NOTHING


async def test_where_a_process_cannot_be_watched_no_device_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = psutil.Process()
    # of the kernel
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # noqa: ASYNC240

    class OldKernel:
        def getsockopt(self, *_: int) -> bytes:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    old = cast("socket.socket", OldKernel())
    SocketPeer(here.pid, os.getuid(), start).watch(old).close()
    for peer in (SocketPeer(0, os.getuid(), 5), SocketPeer(here.pid, os.getuid(), None)):
        with pytest.raises(NodeError, match="different PID namespaces"):
            peer.watch(old)
    with pytest.raises(NodeError, match="has ended"):
        SocketPeer(here.pid, os.getuid(), start + 1).watch(old)


def test_a_client_that_lives_keeps_what_it_holds(shared_node: RunningNode) -> None:
    with (
        shared_node.client() as client,
        child(shared_node, "held = [write_half(client, 64, 1)]") as process,
    ):
        process.send_signal(signal.SIGSTOP)
        with RawClient(
            shared_node.path
        ) as raw:  # until the node has looked after its clients several times
            assert isinstance(raw.hear(), m.Refused)
        assert held_by(client)["reservations"] == 1
        process.send_signal(signal.SIGCONT)


def test_a_process_is_not_taken_for_a_later_one_with_its_number() -> None:
    here = psutil.Process()
    assert not SocketPeer(here.pid, os.getuid(), None).has_ended(), "it cannot be told"
    assert SocketPeer(here.pid, os.getuid(), 1).has_ended(), (
        "another process, started at another time"
    )
    assert not SocketPeer(0, os.getuid(), 5).has_ended(), "in another PID namespace"


def test_a_process_that_cannot_be_looked_at_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor_left(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    here = psutil.Process()
    monkeypatch.setattr(Path, "read_text", no_descriptor_left)
    assert not SocketPeer(here.pid, os.getuid(), 1).has_ended()


def test_a_zombie_has_ended() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    peer = SocketPeer(pid, os.getuid(), start)
    assert not peer.has_ended()
    os.kill(pid, signal.SIGKILL)
    eventually(peer.has_ended)
    os.waitpid(pid, 0)
    assert peer.has_ended()


def test_a_process_is_not_looked_for_in_another_namespaces_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = SocketPeer.of(ours).start
        assert start is not None and start > 0
        monkeypatch.setattr(Path, "readlink", lambda path: Path("4711"))
        assert SocketPeer.of(ours).start is None


# Stalled


def test_another_engine_writes_what_a_stalled_one_has_reserved_in_other_memory(
    start_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text("[node]\nreservation_timeout_s = 0.01\n")
    node = start_node("--config", str(tmp_path / "settings.toml"))
    stalled, other = node.client(), node.client()
    stalled.register(SPACE)
    reservation, written = filled_reservation(stalled, 64, 1)

    def second() -> bool:
        with other.reserve(PLAIN, a_prompt(SPACE, 64, 1).chunks()) as again:
            return bool(again.granted)

    eventually(second)
    assert store(other, a_prompt(SPACE, 64, 1)) == [0, 1, 2, 3]
    assert (bytes_of(reservation) == written).all(), "in memory of its own"
    assert read(other, a_prompt(SPACE, 64, 1)) == 64

    used = other.status()["used_bytes"]
    reservation.commit()  # too late, and no harm
    reservation.close()
    assert other.status()["used_bytes"] == used // 2
    assert other.status()["chunks"] == 4, "never two of one key"
    assert read(other, a_prompt(SPACE, 64, 1)) == 64
    other.clear()
    assert other.status()["used_bytes"] == 0


# By hand


def test_clients_are_listed_with_what_they_hold(node: RunningNode) -> None:
    client = node.client(name="engine")
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64, 1))
    hit = client.lookup(a_prompt(SPACE, 64, 1).query())
    lease = client.claim(hit.ticket)
    reservation = client.reserve(PLAIN, a_prompt(SPACE, 32, 2).chunks())
    (row,) = json.loads(run_kvhold("clients", "--socket", str(node.path), "--json").stdout)
    used = client.status()["used_bytes"]
    assert row.pop("silent_s") >= 0
    expected = {
        "id": "c1",
        "name": "engine",
        "pid": os.getpid(),
        "alive": True,
        "hits": 1,
        "leases": 1,
        "reservations": 1,
        "nbytes": used,
    }
    assert row == expected | {"ended": False, "device": False, "pinned_bytes": 0}
    table = run_kvhold("clients", "--socket", str(node.path)).stdout.splitlines()
    assert [line.split()[0] for line in table] == ["ID", "c1"]
    assert lease is not None
    for held in (lease, reservation, hit):
        held.close()


def test_a_client_that_is_kicked_is_not_answered_and_its_memory_goes_back_when_it_is_dead(
    node: RunningNode,
) -> None:
    client = node.client()
    client.register(SPACE)
    with child(node, "held = [write_half(client, 64, 1)]") as process:
        process.send_signal(signal.SIGSTOP)
        done = run_kvhold("kick", str(process.pid), "--socket", str(node.path))
        assert done.returncode == 0
        assert f"pid {process.pid}" in done.stdout
        assert "are freed when it closes its connection or dies" in done.stdout
        assert held_by(client)["reservations"] == 1
        (row,) = [one for one in client.clients() if one.pid == process.pid]
        assert row.ended
        assert store(client, a_prompt(SPACE, 64, 1)) == [0, 1, 2, 3], (
            "what it had reserved is another's to write, at once"
        )
        process.kill()
        eventually(lambda: held_by(client) == NOTHING)
    assert read(client, a_prompt(SPACE, 64, 1)) == 64


def test_a_client_that_was_kicked_by_mistake_joins_again(node: RunningNode) -> None:
    client, other = node.client(), node.client()
    (number,) = [one.number for one in other.clients() if one.number == 1]
    assert [one.number for one in other.kick(number=number)] == [1]
    eventually(lambda: works(client))
    assert sorted(one.number for one in other.clients()) == [2, 3]


@pytest.mark.parametrize(
    ("client", "status", "said"),
    [("c99", 1, "has no client c99"), ("x", 2, "neither an ID"), ("0", 2, "neither")],
)
def test_who_is_not_there_cannot_be_kicked(
    shared_node: RunningNode, client: str, status: int, said: str
) -> None:
    done = run_kvhold("kick", client, "--socket", str(shared_node.path))
    assert done.returncode == status
    assert said in done.stderr


def test_clients_that_all_claim_one_process_id_are_known_by_the_kernels(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client, RawClient(shared_node.path) as raw:
        raw.say(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "in a container", 1))
        assert isinstance(raw.hear(), m.Welcome)
        assert {one.pid for one in client.clients()} == {os.getpid()}
        assert client.kick(pid=1) == []


def test_a_client_for_which_one_descriptor_is_too_few_is_told_so(node: RunningNode) -> None:
    """Its connection gets the last one, and there is none to send the arena's with."""
    client, process = node.client(), psutil.Process(node.pid)
    client.ping()  # the descriptor by which it was welcomed is closed
    taken = {int(entry.name) for entry in Path(f"/proc/{node.pid}/fd").iterdir()}
    lowest_free = next(number for number in count() if number not in taken)
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        with pytest.raises(NodeRefused, match="no descriptor left"):
            node.client()
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    node.client().ping()
    client.ping()


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """This process can open so many more files."""
    taken = open_descriptors()
    free = (candidate for candidate in count() if candidate not in taken)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, number, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_engine_without_enough_descriptors_to_join_is_told_so(
    shared_node: RunningNode, number: int
) -> None:
    """One wakes the keeper, one is for ending waiting calls, one is the socket, and one is the
    arena.
    """
    with (
        descriptors_left(number),
        pytest.raises(NodeError, match=r"cannot join a node.*Too many open files"),
    ):
        NodeClient(shared_node.path, PATIENT)
    with descriptors_left(4), NodeClient(shared_node.path, PATIENT) as client:
        client.ping()


def test_an_engine_without_a_descriptor_to_map_the_arena_is_told_so_and_may_try_again(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client:
        client.register(SPACE)
        assert client._link is not None
        with descriptors_left(0), pytest.raises(NodeError, match="could not be mapped"):
            client._link.hold(writable=True)
        store(client, a_prompt(SPACE, 64))
        client.clear()


# Many


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("this user may not open 4,096 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_256_engines_of_two_processes_share_a_node_with_1024_descriptors(
    many_descriptors: None, tmp_path: Path
) -> None:
    script = tmp_path / "limited"
    script.write_text(f'#!/bin/sh\nulimit -n 1024\nexec {sys.executable} "$@"\n')
    script.chmod(0o700)
    path, log = tmp_path / "s", tmp_path / "log"
    with log.open("wb") as output, ExitStack() as crowd:
        command = [
            str(script),
            "-m",
            "kvhold",
            "serve",
            "--socket",
            str(path),
            "--ram-bytes",
            "4MiB",
        ]
        node = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, text=True, env=clean_environ()
        )
        crowd.callback(node.wait, PATIENT_S)
        crowd.callback(node.terminate)
        assert node.stdout is not None
        with node.stdout as said:
            assert "ready" in said.readline()
        before = psutil.Process(node.pid).num_fds()
        engines = [crowd.enter_context(RawClient(path, greet=True)) for _ in range(512)]
        assert all(engine.ask(m.Ping()) == m.Done() for engine in engines)
        assert psutil.Process(node.pid).num_fds() <= before + 512, "one a connection"

        def join_until_refused() -> None:
            for _ in range(600):
                crowd.enter_context(NodeClient(path, PATIENT))

        with pytest.raises(NodeError, match="ulimit -n"):
            join_until_refused()
        assert all(engine.ask(m.Ping()) == m.Done() for engine in engines), (
            "they are served as before"
        )
        assert psutil.Process(node.pid).num_fds() < 1024, "some are left for tiers"
    text = log.read_text()
    assert "Traceback" not in text
    assert text.count("refused a client") == 1
