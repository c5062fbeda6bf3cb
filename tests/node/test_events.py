"""Events through the node's protocol."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvhold.cache.state import new_state
from kvhold.core.config import Config
from kvhold.core.errors import ProtocolError
from kvhold.net import messages as m
from kvhold.node import session as session_module
from kvhold.node.session import Session
from tests.cache.scripted import arena_of
from tests.cache.test_events import HYBRID_SPACE, SPACE, Follower, live
from tests.cache.test_state import LAYOUT, SPACES
from tests.node.nodes import RunningNode


def test_an_index_is_kept_through_a_node_and_begun_anew_with_another_node(
    start_node: Callable[..., RunningNode], tmp_path: Path
) -> None:
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


def test_a_snapshot_in_pages_and_the_events_after_it_say_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "MOST", 8)
    state = new_state(Config(event_buffer=1000), arena_of(16 << 20))
    state.register(LAYOUT)
    session = Session(state, m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "test", 1), None)  # type: ignore[arg-type]

    def commit(tokens: list[int]) -> None:
        names = SPACES[0].prompt(tokens).chunks()
        state.commit("a", state.reserve("a", LAYOUT, names, 0).reservation, range(len(names)))

    def ask(request: m.Request) -> m.Happened:
        answer = session.answer(request)
        assert isinstance(answer, m.Happened)
        return answer

    commit(list(range(7)))
    page = first = ask(m.Snapshot(0))
    assert first.more and first.events
    state.clear(None)
    commit(list(range(100, 107)))
    there, pages = {event.key for event in first.events}, 1
    while page.more:
        page = ask(m.Snapshot(pages))
        there |= {event.key for event in page.events}
        assert page.next == first.next
        pages += 1
    assert pages > 2
    with pytest.raises(ProtocolError):
        session.answer(m.Snapshot(1))
    number = first.next
    while (batch := ask(m.Events(number))).events:
        assert not batch.lost
        for event in batch.events:
            (there.add if event.kind == "admitted" else there.discard)(event.key)
        number = batch.next
    assert there == {entry.key for entry in state.ram.entries()}
    assert len(there) == 12
