"""Two nodes on one Redis: each announces the chunks that it knows to be there."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("zmq", reason="no pyzmq: pip install 'kvhold[events]'")

import zmq

from kvhold.core.keys import NAME_BYTES, Namespace
from kvhold.core.router_events import BlockHash, ChunkDescription, RouterBatch, StoredBlocks
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, store
from kvhold_lab.servers.redis import RedisServer
from tests.node.nodes import PATIENT_S, RunningNode
from tests.node.test_router_publisher import RouterIndex, _batches
from tests.tiers.conftest import server_or_skip

SPACE = Namespace("content:1", PLAIN, title="one")
PROMPT = a_prompt(SPACE, 64)


class Host:
    def __init__(self, folder: Path, redis_port: int) -> None:
        folder.mkdir()
        self._replay = f"ipc://{folder}/replay"
        settings = folder / "kvhold.toml"
        settings.write_text(
            f'tiers = ["redis://127.0.0.1:{redis_port}/0"]\n'
            f'[events]\npublish = "ipc://{folder}/events"\nreplay = "{self._replay}"\n'
        )
        self.node = RunningNode(folder / "node.sock", "--config", str(settings))
        self.client: NodeClient = self.node.client()
        self.client.register(SPACE)

    def describe(self) -> None:
        """As an engine does: one block a chunk."""
        self.client.describe(
            [
                ChunkDescription(name, number, 1, [stored(number)])
                for number, name in enumerate(names())
            ]
        )

    def until(self, **blocks: set[BlockHash]) -> None:
        """blocks: by place of `RouterIndex`"""
        until_s = time.monotonic() + PATIENT_S
        while (found := self._index().blocks) != blocks:
            assert time.monotonic() < until_s, found
            time.sleep(0.05)

    def _index(self) -> RouterIndex:
        index = RouterIndex()
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.RCVTIMEO, 60_000)
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self._replay)
            asking.send_multipart([b"", bytes(8)])
            while payload := asking.recv_multipart()[3]:
                batch: RouterBatch = _batches.decode(payload)
                index.read(batch.events)
        return index


def names() -> list[bytes]:
    return [PROMPT.chunk_key(number)[:NAME_BYTES] for number in range(4)]


def stored(number: int) -> bytes:
    tokens = list(range(10_000 * number, 10_000 * number + 4))
    return msgspec.msgpack.encode(
        StoredBlocks([number], None, tokens, 4, None, None, None, group_idx=0)
    )


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with server_or_skip(RedisServer) as server:
        yield server


@pytest.fixture
def hosts(tmp_path: Path, nothing_is_left: None, redis: RedisServer) -> Iterator[list[Host]]:
    made = [Host(tmp_path / name, redis.port) for name in ("a", "b")]
    yield made
    for host in made:
        host.node.close()


ALL: set[BlockHash] = {0, 1, 2, 3}
NONE: set[BlockHash] = set()


def test_a_store_is_announced_by_who_wrote_it_and_by_who_found_it(hosts: list[Host]) -> None:
    one, other = hosts
    one.describe()
    store(one.client, PROMPT)
    assert one.client.flush(deadline_s=PATIENT_S)
    one.until(CPU=ALL, STORAGE=NONE, REMOTE=ALL)
    other.describe()
    other.until(CPU=NONE, STORAGE=NONE, REMOTE=NONE)
    with other.client.lookup(PROMPT.query(), wait_s=PATIENT_S) as hit:
        assert hit.num_tokens == 64
    other.until(CPU=ALL, STORAGE=NONE, REMOTE=ALL)
    one.client.clear(SPACE.digest)
    one.until(CPU=NONE, STORAGE=NONE, REMOTE=NONE)
    with other.client.lookup(a_prompt(SPACE, 64, seed=9).query(), wait_s=PATIENT_S):
        pass  # it learns of the clear
    other.until(CPU=NONE, STORAGE=NONE, REMOTE=NONE)


def test_values_that_the_store_lost_are_taken_back_when_they_are_missed(
    hosts: list[Host], redis: RedisServer
) -> None:
    one = hosts[0]
    one.describe()
    store(one.client, PROMPT)
    assert one.client.flush(deadline_s=PATIENT_S)
    one.until(CPU=ALL, STORAGE=NONE, REMOTE=ALL)
    redis.call("FLUSHALL")
    one.client.clear(SPACE.digest, tier="ram")
    one.until(CPU=NONE, STORAGE=NONE, REMOTE=ALL)
    with one.client.lookup(PROMPT.query(), wait_s=PATIENT_S) as hit:
        assert hit.num_tokens == 0
    one.until(CPU=NONE, STORAGE=NONE, REMOTE=NONE)
