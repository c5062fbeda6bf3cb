"""Events that the node publishes itself, decoded by vLLM's own records: they say what the node's
memory and disk hold, by the node's own account and by the engine's events.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvhold.core.config import ClientConfig
from kvhold.integrations.vllm import events as events_module
from kvhold.node import NodeClient
from tests.node.dynamo import WHY_NOT, DynamoIndexer
from tests.vllm.scheduling import NodeProcess, eventually, make_prompt
from tests.vllm.test_events import BLOCK, Followed

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

_batches = msgspec.msgpack.Decoder(KVEventBatch)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_PACE_S", 0.0)


@pytest.fixture
def followed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Followed]]:
    """An engine on a node with little memory, and a disk that has room for all."""
    made: list[Followed] = []

    def make(publish: str, replay: str) -> Followed:
        settings = {
            "EVENT_BUFFER": "100000",
            "EVENTS_PUBLISH": publish,
            "EVENTS_REPLAY": replay,
            "TIERS": f"disk://{tmp_path}/disk?max_bytes=1GiB",
        }
        for name, value in settings.items():
            monkeypatch.setenv(f"KVHOLD_{name}", value)
        made.append(Followed(folder, NodeProcess(tmp_path / "node.sock", ram="1MiB")))
        return made[-1]

    yield make
    for each in made:
        each.engine.run()
        each.engine.close()
        each.node.kill()


class NodeIndex:
    """What the node's batches say, from the first one on."""

    def __init__(self, replay: str) -> None:
        self.blocks: dict[str, set[Any]] = {"CPU": set(), "STORAGE": set()}
        self.stored: dict[Any, BlockStored] = {}
        for batch in replayed_by_node(replay):
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    self.blocks = {"CPU": set(), "STORAGE": set()}
                    continue
                place = self.blocks[event.medium]
                if isinstance(event, BlockRemoved):
                    place.difference_update(event.block_hashes)
                    continue
                place.update(event.block_hashes)
                self.stored |= dict.fromkeys(event.block_hashes, event)


def replayed_by_node(endpoint: str) -> Iterator[KVEventBatch]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 60_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(endpoint)
        asking.send_multipart([b"", bytes(8)])
        while payload := asking.recv_multipart()[-1]:
            yield _batches.decode(payload)


def addresses(followed: Followed) -> tuple[str, str]:
    with NodeClient(followed.node.socket, ClientConfig(), name="test") as client:
        events = client.status()["router_events"]
    return events["publish"], events["replay"]


def compute_all(followed: Followed) -> set[Any]:
    """Return the hashes of all blocks that were stored."""
    blocks: set[Any] = set()
    with NodeClient(followed.node.socket, ClientConfig(), name="test") as client:
        for number in range(20):
            followed.compute(make_prompt(("node events", number), 408))
            # what waits is written before more comes
            eventually(lambda: not client.status()["write_behind"]["chunks"])
    eventually(followed.settles)
    for (_, block), said in followed.router.said.items():
        blocks |= {block} if said.tokens else set()
    return blocks


@pytest.mark.parametrize("kind", [int, bytes])
def test_the_node_says_where_everything_is(
    followed: Callable[..., Followed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(kind is int)))
    engine = followed(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    replay = addresses(engine)[1]
    stored = compute_all(engine)
    in_memory = {block for _, block in engine.router.held}

    def knows() -> bool:
        found = NodeIndex(replay).blocks
        return found["CPU"] == in_memory and found["STORAGE"] == stored

    eventually(knows)
    assert in_memory < stored, "memory is too small, the disk is not"
    index = NodeIndex(replay)
    for block in stored:
        assert type(block) is kind
        event, own = index.stored[block], engine.router.said[0, block]
        at = event.block_hashes.index(block)
        assert tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK]) == own.tokens
        assert (event.block_hashes[at - 1] if at else event.parent_block_hash) == own.parent
        assert event.kv_cache_spec_kind == own.kind
    # what comes back from the disk is in memory, too
    first = engine.texts["request-0"][0]
    engine.engine.scheduler.reset_prefix_cache()
    engine.compute(first)
    eventually(engine.settles)
    in_memory = {block for _, block in engine.router.held}
    eventually(knows)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_dynamos_indexer_finds_an_engines_prompts_on_the_node(
    followed: Callable[..., Followed], tmp_path: Path
) -> None:
    engine = followed("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    with DynamoIndexer(tmp_path, block_size=BLOCK) as indexer:
        indexer.follow(*addresses(engine))
        stored = compute_all(engine)
        in_memory = {block for _, block in engine.router.held}
        eventually(lambda: indexer.blocks() == {"host_pinned": in_memory, "disk": stored})
        for prompt, _ in engine.texts.values():
            assert indexer.matched_tokens(prompt)["disk"] == len(prompt) // BLOCK * BLOCK
