"""Events through the node's protocol."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvhold.cache.state import new_state
from kvhold.core.config import Config
from kvhold.core.errors import ProtocolError
from kvhold.net import messages as m
from kvhold.node import session as session_module
from kvhold.node.session import Session
from tests.cache.test_events import HYBRID_SPACE, SPACE, Follower, live
from tests.cache.test_state import LAYOUT, SPACES
from tests.node.nodes import RunningNode


def test_an_index_is_kept_through_a_node_and_begun_anew_with_another_node(start_node: Callable[..., RunningNode], tmp_path: Path) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text("event_buffer = 100000\n")
    node = start_node("--config", str(settings), "--ram-bytes", "2MiB")
    with node.client() as client:
        for space in (SPACE, HYBRID_SPACE):
            client.register(space)
        follower = Follower(client)
        live(client, follower, seed=3, steps=20, pause=5)
        assert follower.resets == 0
        before = follower.next
    node.kill()
    with start_node("--config", str(settings)).client() as client:
        assert client.events(before).lost


def test_a_snapshot_comes_in_parts_and_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MOST", 4)
    state = new_state(Config(event_buffer=1000), SimpleNamespace(nbytes=16 << 20))
    state.register(LAYOUT)
    session = Session(state, m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "test", 1), dict, lambda: None)
    prompt = SPACES[0].prompt(list(range(7)))
    granted = state.reserve("a", LAYOUT, prompt.chunks(), 0)
    state.commit("a", granted.room, range(4))
    first = session.answer(m.Snapshot(0))
    assert isinstance(first, m.Happened) and first.more
    state.clear(None)
    keys, part = [event.key for event in first.events], first
    while part.more:
        part = session.answer(m.Snapshot(len(keys)))
        assert isinstance(part, m.Happened)
        keys += [event.key for event in part.events]
        assert part.next == first.next
    assert len(set(keys)) == len(keys) == 12, "of the moment before the clear"
    gone = session.answer(m.Events(first.next))
    assert isinstance(gone, m.Happened)
    assert {event.key for event in gone.events} == set(keys)
    assert session.answer(m.Snapshot(4)) == m.Happened([], first.next), "it is over"
    with pytest.raises(ProtocolError):
        session.answer(m.Snapshot(-1))
