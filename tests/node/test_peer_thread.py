"""The thread of a node's peers."""

import asyncio

from kvhold.cache.state import CacheState, new_state
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


async def test_a_thread_that_never_served_ends() -> None:
    state = new_state(Config(), arena_of(1 << 20))
    thread = PeerThread(ServePeersConfig(listen="127.0.0.1:0"), state, lambda call: call())
    await asyncio.get_running_loop().run_in_executor(None, thread.close)
    assert not thread._thread.is_alive()
