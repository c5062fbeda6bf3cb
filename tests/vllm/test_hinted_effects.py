"""Hints of requests to a real vLLM, and what they change in the node's memory."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.core.keys import NAME_BYTES, split_hashes
from kvhold.node.namespaces import namespace_for_prompts
from kvhold.testing.cache import store
from kvhold_lab.engines.engine import Engine
from tests.node.fleets import joined
from tests.node.nodes import PATIENT_S, RunningNode, eventually
from tests.vllm.hinting import CHUNK, ask, engine_on

pytestmark = [pytest.mark.vllm, pytest.mark.server]

NUM_CHUNKS = 5
PIN: dict[str, Any] = {"action": "pin", "ttl_s": 600}
RETAIN: dict[str, Any] = {"action": "retain", "ttl_s": 600}
DEMOTE: dict[str, Any] = {"action": "demote"}
OF_SESSION: dict[str, Any] = {"target": "session"}
UNTIL_SUPERSEDED: dict[str, Any] = {"action": "retain", "until": "superseded"}


def a_prompt(seed: int, num_chunks: int = NUM_CHUNKS) -> list[int]:
    return random.Random(seed).choices(range(10, 200), k=num_chunks * CHUNK)


PLAIN, DEMOTED, PINNED, KEPT, TURN, BRIEF, OLDER, IDLE = map(a_prompt, range(8))
NEWER = TURN[: 3 * CHUNK] + a_prompt(8, 2)
A_FEW = a_prompt(9, 1)[:5]


class Watched:
    """A real engine, and its node of 16 MiB, in which 128 chunks fit, over a disk."""

    def __init__(self, node: RunningNode, engine: Engine) -> None:
        self.client = node.client()
        self._engine = engine
        self._numbers = count(1000)
        ask(engine, A_FEW)
        digits = self.client.names()[0][0].digest.hex()
        self._space = namespace_for_prompts(self.client, digits)
        self._other = joined(node, self._space)

    def hint(self, prompt: list[int], *hints: dict[str, Any], **rules: Any) -> list[str]:
        """The outcomes, when what the request stores is in memory and on the disk."""
        outcomes = [one["outcome"] for one in ask(self._engine, prompt, *hints, **rules)]
        if rules.get("store", True):
            self._until_there(prompt)
        return outcomes

    def chunks(self, prompt: list[int]) -> int:
        """Those in memory, which do not count as used."""
        query = self._space.prompt(prompt).query()
        there = {event.key[:NAME_BYTES] for event in self.client.snapshot().events}
        return sum(query.namespace + one in there for one in split_hashes(query.hashes))

    def sources(self, prompt: list[int]) -> dict[str, int]:
        """Tokens by place. They are loaded."""
        assert self.client.flush(deadline_s=PATIENT_S), "there is room"
        query = self._space.prompt(prompt).query()
        with self.client.lookup(query, uses="none", wait_s=PATIENT_S) as hit:
            return dict(hit.sources)

    def press_out(self, prompt: list[int]) -> None:
        """Store others until none of it is in memory."""

        def pressed() -> bool:
            begin = 1000 * next(self._numbers)
            store(self._other, self._space.prompt(list(range(begin, begin + CHUNK))))
            return self.chunks(prompt) == 0

        eventually(pressed)

    def press(self) -> None:
        """Store twice what memory holds."""
        for _ in range(4):
            begin = 1000 * next(self._numbers)
            store(self._other, self._space.prompt(list(range(begin, begin + 64 * CHUNK))))
            assert self.client.flush(deadline_s=PATIENT_S)

    def _until_there(self, prompt: list[int]) -> None:
        eventually(lambda: self.chunks(prompt) == len(prompt) // CHUNK)
        assert self.client.flush(deadline_s=PATIENT_S)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    settings = folder / "kvhold.toml"
    settings.write_text(f'event_buffer = 1000\ntiers = ["disk://{folder}/disk?max_bytes=1GiB"]\n')
    node = RunningNode(folder / "node.sock", "--config", str(settings))
    try:
        with engine_on(node) as engine:
            yield Watched(node, engine)
    finally:
        node.close()


def test_hints_decide_what_stays_in_memory(watched: Watched) -> None:
    watched.hint(PLAIN)
    assert watched.hint(DEMOTED, DEMOTE) == ["deferred"]
    assert watched.hint(PINNED, PIN) == ["accepted"]
    assert watched.hint(KEPT, RETAIN | {"ttl_s": 1e5}) == ["clipped"], "to hints.max_ttl_s"
    assert watched.hint(TURN, UNTIL_SUPERSEDED, session_id="s") == ["accepted"]
    watched.press_out(DEMOTED)
    assert watched.chunks(PLAIN) > 0, "though it is older"
    assert watched.sources(DEMOTED) == {"disk": NUM_CHUNKS * CHUNK}

    watched.press()
    assert [watched.chunks(one) for one in (PLAIN, DEMOTED)] == [0, 0]
    assert [watched.chunks(one) for one in (PINNED, KEPT, TURN)] == 3 * [NUM_CHUNKS]

    assert watched.hint(NEWER, UNTIL_SUPERSEDED, session_id="s") == ["accepted"]
    assert watched.hint(BRIEF, RETAIN | {"ttl_s": 0.5}) == ["accepted"]
    watched.press_out(BRIEF)
    watched.press()
    assert [watched.chunks(one) for one in (TURN, NEWER)] == [3, NUM_CHUNKS]
    assert [watched.chunks(one) for one in (PINNED, KEPT)] == 2 * [NUM_CHUNKS]


def test_an_idle_session_leaves_memory_and_returns_when_told(watched: Watched) -> None:
    prefetch = {"action": "prefetch"} | OF_SESSION
    assert watched.hint(A_FEW, prefetch, session_id="idle") == ["missing"]
    assert watched.hint(A_FEW, prefetch) == ["rejected"], "which session?"
    watched.hint(OLDER)
    watched.hint(IDLE, session_id="idle")
    assert watched.hint(A_FEW, DEMOTE | OF_SESSION, session_id="idle") == ["accepted"]
    watched.press_out(IDLE)
    assert watched.chunks(OLDER) > 0, "though it is older"
    watched.press()
    assert watched.hint(A_FEW, prefetch, session_id="idle") == ["deferred"]
    eventually(lambda: watched.chunks(IDLE) == NUM_CHUNKS)
