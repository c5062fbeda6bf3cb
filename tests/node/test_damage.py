"""What one process damages in the arena, no other process gets as a hit."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvhold.cache.state import new_state
from kvhold.core.config import Config
from kvhold.core.errors import DamagedChunks
from kvhold.core.holdings import ABSENT
from kvhold.net import messages as m
from kvhold.node import NodeClient
from kvhold.node import session as session_module
from kvhold.node.session import Session
from kvhold.testing.cache import PLAIN, a_prompt, read, store
from kvhold.testing.damage import OpenArena
from tests.node.nodes import NOTHING, SPACE, RunningNode, eventually

FOUND = "kvhold_damaged_chunks{found_by=reader}"


def places_of(client: NodeClient, seed: int) -> list[int]:
    """Where the chunks of a prompt of 64 tokens lie."""
    with client.lookup(a_prompt(SPACE, 64, seed).query()) as hit:
        lease = client.claim(hit.ticket)
        assert lease is not None
        with lease:
            return [int(offset) for offset in lease.chunks().offsets if offset != ABSENT]


def test_a_stray_write_is_a_miss_for_every_other_client(node: RunningNode) -> None:
    """A5: one stray write, and the next hit had a wrong byte."""
    writer, reader = node.client(), node.client()
    for client in (writer, reader):
        client.register(SPACE)
    store(writer, a_prompt(SPACE, 64, 1))
    third = places_of(reader, 1)[2]
    with writer.reserve(PLAIN, a_prompt(SPACE, 16, 2).chunks()) as reservation:
        reservation.buffer[third + 100] ^= 1  # a process that may store may write anywhere
        before = reader.status()["counters"].get(FOUND, 0)
        with pytest.raises(
            DamagedChunks, match="the bytes of 1 chunks in memory are not those that were stored"
        ):
            read_unchecked(reader, 1)
    assert read(reader, a_prompt(SPACE, 64, 1)) == 32, "what lies before it is still good"
    assert reader.status()["counters"][FOUND] == before + 1
    assert "missed_tokens{reason=damaged}" in str(reader.status()["counters"])
    assert "bytes in memory" in node.log.read_text()
    store(writer, a_prompt(SPACE, 64, 1))
    assert read(reader, a_prompt(SPACE, 64, 1)) == 64, "it can be stored again"
    eventually(lambda: reader.status()["held"] == NOTHING)


def read_unchecked(client: NodeClient, seed: int) -> None:
    """What a reader does that cannot know the right bytes."""
    with client.lookup(a_prompt(SPACE, 64, seed).query()) as hit:
        lease = client.claim(hit.ticket)
        assert lease is not None
        with lease:
            lease.verify(PLAIN)


A_STRAY_WRITE = """
import ctypes, sys
from pathlib import Path
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, store
from tests.node.nodes import SPACE
client = NodeClient(Path(sys.argv[1]))
client.register(SPACE)
with client.lookup(a_prompt(SPACE, 64, 8).query()) as hit:
    lease = client.claim(hit.ticket)
    assert not lease.buffer.flags.writeable
    print(open("/proc/self/maps").read().count("memfd:kvhold-arena"), flush=True)
    ctypes.memset(lease.buffer.ctypes.data + int(lease.chunks().offsets[0]), 1, 1)
print("it went through", flush=True)
"""


def test_a_reader_cannot_write_through_what_it_reads_and_has_no_other_mapping(
    node: RunningNode,
) -> None:
    client = node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64, 8))
    ended = subprocess.run(
        [sys.executable, "-c", A_STRAY_WRITE, str(node.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("1\n", -signal.SIGSEGV), ended.stderr
    assert read(client, a_prompt(SPACE, 64, 8)) == 64


def test_no_flipped_bit_is_delivered(node: RunningNode) -> None:
    """The short form of `kvhold bench soak damage`."""
    client, rng = node.client(), np.random.default_rng(5)
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64, 3))
    with OpenArena(node.pid) as arena:
        for _ in range(200):
            places = places_of(client, 3)
            chunk = int(rng.integers(len(places)))
            arena.flip(
                places[chunk] + int(rng.integers(PLAIN.chunk_bytes(0, 16))), int(rng.integers(8))
            )
            with pytest.raises(DamagedChunks):
                read_unchecked(client, 3)
            assert read(client, a_prompt(SPACE, 64, 3)) == 16 * chunk
            store(client, a_prompt(SPACE, 64, 3))
    assert read(client, a_prompt(SPACE, 64, 3)) == 64


def test_who_turns_the_check_off_gets_what_is_there(node: RunningNode) -> None:
    """Only to measure what the check costs."""
    checking, trusting = node.client(), node.client(check_memory=False)
    checking.register(SPACE)
    store(checking, a_prompt(SPACE, 64, 4))
    with OpenArena(node.pid) as arena:
        arena.flip(places_of(checking, 4)[0])
    read_unchecked(trusting, 4)
    checking.checks_memory, before = False, checking.checks_memory
    read_unchecked(checking, 4)
    checking.checks_memory = before
    with pytest.raises(DamagedChunks):
        read_unchecked(checking, 4)
    assert read(trusting, a_prompt(SPACE, 64, 4)) == 0


def test_a_claim_with_more_checksums_than_fit_an_answer_is_refused_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "_MOST_CHECKSUMS", 8 * 3 * 4)
    state = new_state(Config(), SimpleNamespace(nbytes=16 << 20))  # type: ignore[arg-type]
    state.register(PLAIN)
    session = Session(state, m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "test", 1), None)  # type: ignore[arg-type]
    for num_chunks, expected in ((4, m.Leased), (5, m.Refused)):
        prompt = a_prompt(SPACE, 16 * num_chunks, num_chunks)
        granted = state.reserve(session, PLAIN, prompt.chunks(), 0)
        state.commit(session, granted.reservation, range(num_chunks), bytes(8 * 3 * num_chunks))
        answer = session.answer(m.Claim(state.lookup(session, prompt.query()).ticket, 0, 0))
        assert isinstance(answer, expected)
        assert not isinstance(answer, m.Refused) or not answer.fatal
    assert state.holdings()["leases"] == 1
