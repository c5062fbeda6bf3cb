"""The thread of a node's peers."""

import asyncio

import pytest

from kvhold.cache.state import CacheState, new_state
from kvhold.cache.transfer.commands import ClearCommand
from kvhold.core.config import Config, ServePeersConfig
from kvhold.node.peer_thread import PeerThread
from kvhold.testing.tier import make_key
from tests.cache.scripted import arena_of
from tests.node.nodes import eventually


def test_chunks_that_are_noted_before_peers_are_served_do_not_queue() -> None:
    state: CacheState = new_state(Config(), arena_of(1 << 20))
    thread = PeerThread(ServePeersConfig(listen="127.0.0.1:0"), state, lambda call: call())
    try:
        for number in range(3_000):  # as a disk that is opened
            thread.feed.note_on_disk(make_key(number), 100)
        eventually(lambda: len(thread.feed) == 3_000)
        assert not thread.feed.num_waiting
    finally:
        thread.close()
    thread.close()


@pytest.mark.parametrize("tiers", [(), ("memory://",)], ids=["memory alone", "a tier"])
def test_a_clear_tells_the_time_at_which_memory_was_cleared(tiers: tuple[str, ...]) -> None:
    told: list[tuple[bytes, float | None]] = []
    state = new_state(Config(tiers=tiers), arena_of(1 << 20))
    state.when_cleared = lambda prefix, asked_s: told.append((prefix, asked_s))
    before_s = state.ram.now()
    state.clear(None)
    after_s = state.ram.now()
    for command in state.take_commands():
        assert isinstance(command, ClearCommand)
        state.cleared(command.prefix, command.asked_s)
    [(prefix, asked_s)] = told
    assert prefix == b"" and asked_s is not None and before_s <= asked_s <= after_s


async def test_a_thread_that_never_served_ends() -> None:
    state = new_state(Config(), arena_of(1 << 20))
    thread = PeerThread(ServePeersConfig(listen="127.0.0.1:0"), state, lambda call: call())
    await asyncio.get_running_loop().run_in_executor(None, thread.close)
    assert not thread._thread.is_alive()
