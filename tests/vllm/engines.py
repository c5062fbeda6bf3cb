"""Engines over a node for tests that step vLLM's scheduler, and what such tests do with them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvhold.core.errors import NodeError
from tests.vllm.scheduling import WITHIN_S, Engine, NodeProcess, Options, eventually

BLOCK, CHUNK = 16, 64
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}
IMPATIENT = {
    "client": {
        "call_timeout_s": 0.2,
        "connect_timeout_s": 2.0,
        "reconnect_interval_s": 0.05,
        "heartbeat_interval_s": 0.2,
    }
}
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node for the tests that leave it alone."""
    process = NodeProcess(tmp_path_factory.mktemp("node") / "node.sock")
    yield process
    process.kill()


@pytest.fixture
def engine(node: NodeProcess, folder: Path) -> Iterator[MakeEngine]:
    """Engines on the node.

    In the end each has finished its requests, and nothing is held for it any more.
    """
    yield from engines_on(node, folder)


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node of the test's own."""
    process = NodeProcess(tmp_path / "frail.sock")
    yield process
    process.go_on()
    process.kill()


def engines_on(node: NodeProcess, folder: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(*, real_worker: bool = False, **options: Any) -> Engine:
        engines.append(Engine(Options(folder, **options), node.socket, real_worker=real_worker))
        return engines[-1]

    yield make
    for engine in engines:
        engine.hands.hold = False
        engine.run()
        assert engine.followed() == 0
    eventually(lambda: node.held() == NOTHING)
    for engine in engines:
        engine.close()


def forget_locally(engine: Engine) -> None:
    """Empty vLLM's own prefix cache, when all that a worker has copied is committed."""
    node = engine.connector.scheduler._cache
    eventually(lambda: not node.status()["held"]["reservations"])
    assert engine.scheduler.reset_prefix_cache()


def tokens_held(engine: Engine, text: list[int]) -> int:
    """How much of a text the node has."""
    side = engine.connector.scheduler
    with side._cache.lookup(side._namespace.prompt(text).query()) as hit:
        return hit.num_tokens


def free_blocks(engine: Engine) -> int:
    return int(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def store(engine: Engine, prompt: list[int]) -> None:
    """Have the prompt computed and stored, and nothing left of it in the engine."""
    engine.add(f"store-{len(engine.outputs)}", prompt, max_tokens=1)
    engine.run()
    forget_locally(engine)
    for record in (engine.stores, engine.loads, engine.outputs, engine.tokens_computed):
        record.clear()


def table(engine: Engine, request_id: str) -> list[int]:
    """A request's blocks."""
    return list(engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0])


class Restart:
    """A start of the next node that ends when the test says so."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._goes_on = Event()
        self._fails = False
        self.missed: Counter[str] = Counter()  # tokens, by reason, since it began

    def begin(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the engine start the next node from now on, and kill this one."""
        cache = engine.connector.scheduler._cache
        cache._revive = self._revive
        monkeypatch.setattr(engine.connector.scheduler.tally, "looked_up", self._count)
        self._node.kill()
        eventually(lambda: cache.is_rejoining)

    def end(self, *, fail: bool = False) -> None:
        """The node listens, or could not start."""
        if not fail:
            self._node.start_again()
        self._fails = fail
        self._goes_on.set()

    def _count(self, num_tokens: int, *, sources: Mapping[str, int], reason: str) -> None:
        self.missed[reason] += num_tokens - sum(sources.values())

    def _revive(self, closed: Event) -> None:
        self._goes_on.wait(WITHIN_S)
        if self._fails:
            raise NodeError("the test says so")


def followed(engine: Engine, request_id: str) -> Any:
    """What the connector keeps about a request."""
    return engine.connector.scheduler._request_states[request_id]


def asks(**rules: Any) -> dict[str, Any]:
    """A request's word about the cache, as vLLM's server passes it on."""
    return {"sampling": {"extra_args": {"kv_transfer_params": {"kvhold": rules}}}}
