"""Clients die, hang and misuse their connection; the node takes back what they held, when they can
no longer touch it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvhold.core.errors import DeadlineExceeded, NodeError, ProtocolError
from kvhold.core.keys import HASH_BYTES, ChunkNames, Prompt
from kvhold.net import messages as m
from kvhold.net.offsets import unpack
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, check, fill, flood, read, store
from tests.node.nodes import (
    NOTHING,
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
    works,
)

CHILD = """
import signal, sys
from pathlib import Path
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt
from tests.node.nodes import PATIENT, SPACE, write_half
client = NodeClient(Path(sys.argv[1]), PATIENT, name="child")
client.register(SPACE)
{work}
print("ready", flush=True)
signal.pause()
"""


@contextmanager
def child(node: RunningNode, work: str) -> Iterator[subprocess.Popen[str]]:
    """A process that joins the node, does its work and then waits."""
    command = [sys.executable, "-c", CHILD.format(work=work), str(node.path)]
    environ = clean_environ(PYTHONPATH=os.pathsep.join(sys.path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_client_killed_in_the_middle_of_a_store_leaves_nothing(shared_node: RunningNode) -> None:
    with shared_node.client() as client:
        client.register(SPACE)
        with child(
            shared_node,
            "held = [write_half(client, 64, seed) for seed in (1, 2)]; held[1].commit([0])",
        ) as process:
            assert held_by(client) == {"tickets": 0, "leases": 0, "reservations": 2}
            used = client.status()["used_bytes"]
            assert store(client, a_prompt(SPACE, 64, 1)) == [], "it is being written"
            process.kill()
            eventually(lambda: held_by(client) == NOTHING)
        assert found_by(client, a_prompt(SPACE, 64, 1)) == [0]
        assert found_by(client, a_prompt(SPACE, 64, 2)) == [16], "nothing but what was committed"
        assert client.status()["used_bytes"] == used // 8
        assert store(client, a_prompt(SPACE, 64, 1)) == [0, 1, 2, 3]
        assert read(client, a_prompt(SPACE, 64, 1)) == 64
        client.clear()
        assert client.status()["used_bytes"] == 0


def test_a_client_killed_while_it_holds_loans_and_hits_gives_them_back(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client:
        client.register(SPACE)
        store(client, a_prompt(SPACE, 64))
        work = (
            "hits = [client.lookup(a_prompt(SPACE, 64).query()) for _ in range(3)]; lease = "
            "client.claim(hits[0].ticket)"
        )
        with child(shared_node, work) as process:
            assert held_by(client) == {"tickets": 3, "leases": 1, "reservations": 0}
            assert client.clear() == 4
            assert client.status()["used_bytes"] > 0, "it is being read"
            process.kill()
            eventually(lambda: held_by(client) == NOTHING)
        assert client.status()["used_bytes"] == 0
        assert client.status()["pinned_chunks"] == 0


def test_a_ticket_is_claimed_in_another_process_and_outlives_the_one_that_looked_up(
    shared_node: RunningNode,
) -> None:
    prompt = a_prompt(SPACE, 72)
    with (
        shared_node.client(name="scheduler") as scheduler,
        shared_node.client(name="worker") as worker,
    ):
        scheduler.register(SPACE)
        store(worker, prompt)
        hit = scheduler.lookup(prompt.query())
        lease = worker.claim(hit.ticket)
        assert lease is not None
        scheduler.close()
        eventually(lambda: held_by(worker) == {"tickets": 0, "leases": 1, "reservations": 0})
        with lease:
            worker.clear()
            flood(worker, SPACE)
            check(lease, prompt, 72)
        worker.clear()
        assert worker.status()["used_bytes"] == 0


def test_several_clients_claim_one_shard_and_each_ends_by_itself(shared_node: RunningNode) -> None:
    with shared_node.client() as scheduler, shared_node.client() as watcher:
        scheduler.register(SPACE)
        prompt = a_prompt(SPACE, 64, 21)
        store(scheduler, prompt)
        workers = [shared_node.client() for _ in range(3)]
        hit = scheduler.lookup(prompt.query())
        leases = [
            worker.claim(hit.ticket, first_chunk=first)
            for worker, first in zip(workers, (0, 1, 3), strict=True)
        ]
        scheduler.close()  # and with it the hit
        for worker, lease, left in zip(workers, leases, (3, 1, 0), strict=True):
            assert lease is not None
            check(lease, prompt, 64)
            # without letting go, but for its connection: the lease keeps the memory until it is
            # closed
            worker.close()
            lease.close()

            def so_many_are_left(left: int = left) -> bool:
                return watcher.status()["pinned_chunks"] == left

            eventually(so_many_are_left)
        assert held_by(watcher) == NOTHING


def test_what_one_client_is_writing_another_gets_no_memory_for(shared_node: RunningNode) -> None:
    with shared_node.client() as one, shared_node.client() as two:
        one.register(SPACE)
        names = a_prompt(SPACE, 64).chunks()
        with one.reserve(PLAIN, names) as reservation:
            with two.reserve(PLAIN, a_prompt(SPACE, 80).chunks()) as later:
                assert later.granted == [4]
            fill(reservation, PLAIN, names)
            reservation.commit()
        assert read(two, a_prompt(SPACE, 80)) == 64
        two.clear()


def test_memory_of_a_client_that_lost_its_connection_is_nobody_elses_until_it_has_let_go(
    node: RunningNode,
) -> None:
    client = node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64, 2))
    with client.lookup(a_prompt(SPACE, 64, 2).query()) as hit:
        lease = client.claim(hit.ticket)
    assert lease is not None
    reservation, written = filled_reservation(client, 64, 1)
    assert client._link is not None
    client._break(client._link, "as if what came over it had been no answer")
    other = node.client()
    other.clear()
    assert held_by(other) == {"tickets": 0, "leases": 1, "reservations": 1}, (
        "the broken connection is open"
    )
    with other.reserve(PLAIN, a_prompt(SPACE, 4000, 3).chunks()) as everything:
        assert not set(everything.chunks().offsets) & set(reservation.chunks().offsets)
        assert not set(everything.chunks().offsets) & set(lease.chunks().offsets)
    flood(other, SPACE)
    assert (bytes_of(reservation) == written).all()
    check(lease, a_prompt(SPACE, 64, 2), 64)
    with pytest.raises(NodeError):
        reservation.commit()
    eventually(lambda: works(client))
    assert store(client, a_prompt(SPACE, 64, 1)) == [0, 1, 2, 3], (
        "in other memory, over its new connection"
    )
    assert (bytes_of(reservation) == written).all()
    reservation.close()
    assert held_by(other)["leases"] == 1
    check(lease, a_prompt(SPACE, 64, 2), 64)
    lease.close()
    eventually(lambda: held_by(other) == NOTHING)
    other.clear()
    assert other.status()["used_bytes"] == 0


def test_a_client_that_breaks_the_rules_keeps_its_memory_until_it_hangs_up(
    shared_node: RunningNode,
) -> None:
    prompt = a_prompt(SPACE, 64)
    with shared_node.client() as client, RawClient(shared_node.path, greet=True) as raw:
        client.register(SPACE)
        granted = raw.ask(m.Reserve(PLAIN.fingerprint, prompt.chunks(), 0))
        offsets = set(unpack(granted.offsets, 1, 4)[0])
        assert len(offsets) == 4
        raw.socket.sendall(b"\x05\x00\x00\x00wrong")
        assert isinstance(raw.hear(), m.Refused)
        raw.say(m.Abandon(granted.reservation))  # it is not listened to any more
        raw.socket.sendall(bytes(100_000))
        with client.reserve(PLAIN, a_prompt(SPACE, 4000, 3).chunks()) as everything:
            assert not set(everything.chunks().offsets) & offsets
        assert held_by(client)["reservations"] == 1
        raw.socket.close()
        eventually(lambda: held_by(client) == NOTHING)
        assert client.status()["used_bytes"] == 0


class Interrupted(Exception):
    """What a signal's handler raises, as Ctrl-C does."""


def test_a_call_cut_short_does_not_leave_its_answer_to_the_next(node: RunningNode) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    def ask_and_be_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        client.lookup(a_prompt(SPACE, 64, 1).query())

    client = node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64, 1))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with node.stopped(), pytest.raises(Interrupted):
            ask_and_be_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert eventually(lambda: found_by(client, a_prompt(SPACE, 64, 2))) == [0], (
        "not the answer to the other prompt"
    )
    eventually(lambda: held_by(client) == NOTHING)


def found_by(client: NodeClient, prompt: Prompt) -> list[int]:
    """How many tokens; nothing at all while there is no node."""
    try:
        with client.lookup(prompt.query()) as hit:
            return [hit.num_tokens]
    except NodeError:
        return []


def test_a_request_too_long_to_be_sent_is_an_error_and_costs_nothing_else(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client:
        client.register(SPACE)
        reservation, _ = filled_reservation(client, 64, 1)
        with reservation:
            with pytest.raises(ProtocolError, match="bytes"):
                client.reserve(PLAIN, ChunkNames(SPACE.digest, bytes(HASH_BYTES * 500_000)))
            reservation.commit()
        assert read(client, a_prompt(SPACE, 64, 1)) == 64
        client.clear()
        assert held_by(client) == NOTHING


def test_many_threads_share_a_client_and_none_waits_for_one_that_holds_a_room(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client:
        client.register(SPACE)
        with client.reserve(PLAIN, a_prompt(SPACE, 64, 99).chunks()):
            threads = [
                threading.Thread(target=store, args=(client, a_prompt(SPACE, 64, seed)))
                for seed in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [read(client, a_prompt(SPACE, 64, seed)) for seed in range(8)] == [64] * 8
        client.clear()


def test_a_fork_of_a_client_is_told_so_and_disturbs_nobody(shared_node: RunningNode) -> None:
    prompt = a_prompt(SPACE, 64)
    with shared_node.client() as client:
        client.register(SPACE)
        store(client, prompt)
        hit = client.lookup(prompt.query())
        reservation = client.reserve(PLAIN, a_prompt(SPACE, 64, 1).chunks())
        pid = _fork(
            lambda: (
                _is_refused(client.status)
                and _is_refused(reservation.commit)
                and _closes(hit, reservation, client)
            )
        )
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert held_by(client) == {"tickets": 1, "leases": 0, "reservations": 1}, (
            "the child gave nothing of ours away"
        )
        reservation.close()
        lease = client.claim(hit.ticket)
        assert lease is not None
        with hit, lease:
            check(lease, prompt, 64)
        client.clear()


def test_a_fork_made_while_a_thread_has_the_clients_lock_can_close_the_client(
    shared_node: RunningNode,
) -> None:
    with shared_node.client() as client:
        with client._lock:
            pid = _fork(lambda: client._lock.acquire(blocking=False))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _fork(work: Callable[[], bool]) -> int:
    with warnings.catch_warnings():
        # forking a process with threads: what the test is about
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return pid


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except NodeError as error:
        return "fork" in str(error)
    return False


def _closes(*things: object) -> bool:
    for thing in things:
        thing.close()  # type: ignore[attr-defined]
    return True


def test_no_child_process_inherits_the_arena(shared_node: RunningNode) -> None:
    with shared_node.client() as client:
        assert client.arena_buffer.nbytes == 16 << 20
        arenas = [
            fd
            for fd, target in open_descriptors().items()
            if target.startswith("/memfd:kvhold-arena")
        ]
        assert arenas
        assert not any(map(os.get_inheritable, arenas))


def test_a_client_without_a_deadline_of_its_own_waits_no_longer_than_its_setting(
    node: RunningNode,
) -> None:
    client = node.client(call_timeout_s=0.2)
    with node.stopped():
        before = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            client.status()
        assert time.monotonic() - before < PATIENT_S / 2
    assert caught.value.deadline_s == 0.2
