"""The thread of a node's peers."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from kvhold.cache.state import CacheState, new_state
from kvhold.cache.transfer.commands import ClearCommand
from kvhold.core.config import Config, ServePeersConfig
from kvhold.node.peer_feed import PeerFeed
from kvhold.node.peer_thread import PeerThread
from kvhold.testing.tier import make_key
from kvhold.tiers.peers.directory import Listing, Own
from kvhold.tiers.peers.index import PeerIndex
from kvhold.tiers.peers.roster import Roster
from tests.cache.scripted import arena_of
from tests.node.nodes import eventually

PATIENCE_S = 10.0


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


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 12), reason="slices need Linux 6.12"
)
def test_it_takes_short_slices() -> None:
    state = new_state(Config(), arena_of(1 << 20))
    thread = PeerThread(ServePeersConfig(listen="127.0.0.1:0"), state, lambda call: call())
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), thread._loop).result()
        scheduling = Path(f"/proc/self/task/{thread._thread.native_id}/sched")
        [slice_ns] = re.findall(r"^se\.slice\s*:\s*(\d+)", scheduling.read_text(), re.MULTILINE)
        assert int(slice_ns) < 1_000_000
    finally:
        thread.close()


async def test_a_thread_that_never_served_ends() -> None:
    state = new_state(Config(), arena_of(1 << 20))
    thread = PeerThread(ServePeersConfig(listen="127.0.0.1:0"), state, lambda call: call())
    await asyncio.get_running_loop().run_in_executor(None, thread.close)
    assert not thread._thread.is_alive()


@pytest.mark.parametrize("turns", range(8))
async def test_a_follower_that_leaves_at_a_change_is_not_waited_for(turns: int) -> None:
    feed = PeerFeed(lambda key, nbytes, num_tokens: nbytes)
    feed.start()
    waiting = asyncio.create_task(feed.wait(feed.number))
    await asyncio.sleep(0.01)
    feed.note(make_key(1), 100, 1)
    for _ in range(turns):
        await asyncio.sleep(0)
    had_ended = waiting.done()
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert had_ended or waiting.cancelled()


@pytest.mark.parametrize("turns", range(8))
async def test_a_list_that_is_read_again_at_the_end_does_not_hold_it_up(turns: int) -> None:
    roster = Roster(
        PeerIndex(),
        make_peer=lambda number, address: pytest.fail("nobody is listed"),
        make_follower=lambda peer: pytest.fail("nobody is followed"),
        forget_s=1.0,
        directory=_Alone(),
    )
    roster.start()
    await asyncio.sleep(0.01)
    roster.serve_as(Own())
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await roster.close()


class _Alone:
    source = "a list of this node alone"

    async def read(self, own: Own) -> Listing:
        return Listing([], is_alone=True)

    def registered_as(self) -> str:
        return ""

    async def close(self) -> None: ...
