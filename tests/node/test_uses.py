"""A client says which chunks a lookup uses, and the node does as it says."""

from collections.abc import Callable
from typing import Any, get_args

import pytest

from kvhold.cache.state import new_state
from kvhold.core.api import Uses
from kvhold.core.config import Config
from kvhold.net import messages as m
from kvhold.net.wire import encode
from kvhold.node import NodeClient
from kvhold.node.session import Session
from kvhold.testing.cache import a_prompt
from kvhold.tiers.policies import LearnedPolicy
from tests.cache.scripted import arena_of
from tests.node.nodes import SPACE, RawClient, RunningNode


@pytest.mark.parametrize("uses", get_args(Uses))
def test_of_a_new_prompt(
    start_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch, uses: Uses
) -> None:
    said: list[Any] = []
    call = NodeClient._call

    def heard(client: NodeClient, request: Any, *args: Any) -> Any:
        said.append(request)
        return call(client, request, *args)

    prompt = a_prompt(SPACE, 64)
    with start_node("--policy", "learned").client() as client:
        client.register(SPACE)
        monkeypatch.setattr(NodeClient, "_call", heard)
        client.lookup(prompt.query(), uses=uses).close()
    [request] = [request for request in said if isinstance(request, m.Lookup)]

    state = new_state(Config(policy="learned"), arena_of(16 << 20))
    state.register(SPACE.layout, SPACE.digest)
    session = Session(state, m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "test", 1), None)  # type: ignore[arg-type]
    session.answer(request)
    policy = state.ram.policy
    assert isinstance(policy, LearnedPolicy)
    assert policy.ghosts.num == (4 if uses == "all" else 0)


def test_a_client_that_says_something_else_is_hung_up_on(
    start_node: Callable[..., RunningNode],
) -> None:
    said = bytes(encode(m.Lookup(a_prompt(SPACE, 64).query(), uses="some"), 1))  # type: ignore[arg-type]
    with RawClient(start_node().path, greet=True) as raw:
        raw.socket.sendall(said)
        assert isinstance(raw.hear(), m.Refused)
        assert raw.is_closed()
