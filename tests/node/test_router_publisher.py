"""Events that a node publishes for routers: over real ZMQ sockets, and read by Dynamo's indexer."""

import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq", reason="no pyzmq: pip install 'kvhold[events]'")

import zmq

from kvhold.core.errors import ConfigError
from kvhold.core.events_config import EventsConfig
from kvhold.core.keys import place_suffix
from kvhold.core.metrics import Metrics
from kvhold.core.router_events import (
    BlockHash,
    ChunkDescription,
    ClearedBlocks,
    RemovedBlocks,
    RouterBatch,
    RouterEvent,
    StoredBlocks,
)
from kvhold.node import router_ledger, router_publisher
from kvhold.node.router_ledger import RouterLedger
from kvhold.node.router_publisher import RouterPublisher
from tests.node.dynamo import WHY_NOT, DynamoIndexer

BLOCK = 4
PLACES: dict[tuple[str | None, str | None], str] = {
    ("CPU", "LOCAL"): "CPU",
    ("STORAGE", "LOCAL"): "STORAGE",
    ("STORAGE", "REMOTE"): "REMOTE",
}
_batches = msgspec.msgpack.Decoder(RouterBatch)


def name_of(number: int) -> bytes:
    return number.to_bytes(36, "big")


def key_of(number: int, group: int = 0, shard: int = 0) -> bytes:
    return name_of(number) + place_suffix(group, shard)


def describe(
    number: int, hashes: list[BlockHash], *, parent: BlockHash | None = None, shards: int = 1
) -> ChunkDescription:
    first = 10_000 * number
    tokens = list(range(first, first + BLOCK * len(hashes)))
    stored = StoredBlocks(hashes, parent, tokens, BLOCK, None, "CPU", None, group_idx=0)
    return ChunkDescription(name_of(number), number, shards, [msgspec.msgpack.encode(stored)])


class RouterIndex:
    """What a router believes: blocks by medium."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[BlockHash]] = {"CPU": set(), "STORAGE": set(), "REMOTE": set()}
        self.tokens: dict[BlockHash, list[int]] = {}

    def read(self, events: list[RouterEvent]) -> None:
        for event in events:
            if isinstance(event, ClearedBlocks):
                self.__init__()  # type: ignore[misc]
                continue
            where = event.medium, event.locality
            place = self.blocks[PLACES[where]]
            if isinstance(event, RemovedBlocks):
                assert place.issuperset(event.block_hashes)
                place.difference_update(event.block_hashes)
                continue
            assert place.isdisjoint(event.block_hashes)
            place.update(event.block_hashes)
            for at, block in enumerate(event.block_hashes):
                tokens = event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                assert self.tokens.setdefault(block, tokens) == tokens


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RouterPublisher]]:
    made: list[RouterPublisher] = []

    def start_publisher(*, runs: bool = True, **changes: Any) -> RouterPublisher:
        settings = {
            "publish": f"ipc://{tmp_path}/events",
            "replay": f"ipc://{tmp_path}/replay",
        } | changes
        made.append(RouterPublisher(EventsConfig(**settings), Metrics()))
        if runs:
            made[-1].start()
        return made[-1]

    yield start_publisher
    for publisher in made:
        publisher.close()


def replayed(publisher: RouterPublisher, first: int = 0) -> list[tuple[bytes, int, RouterBatch]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 60_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(publisher.replay_address)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[bytes, int, RouterBatch]] = []
        while True:
            empty, topic, number, payload = asking.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == b"\xff" * 8
                return found
            found.append((topic, int.from_bytes(number, "big"), _batches.decode(payload)))


def settled(publisher: RouterPublisher) -> None:
    """All that was noted before has been published."""
    publisher.note(key_of(1 << 40), 0, True)
    end_s = time.monotonic() + 60
    while publisher.status()["waiting_changes"]:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    replayed(publisher, 1 << 40)  # answered after the turn


def index_of(publisher: RouterPublisher) -> RouterIndex:
    index = RouterIndex()
    for _, _, batch in replayed(publisher):
        index.read(batch.events)
    return index


@pytest.mark.parametrize("seed", range(10))
def test_what_is_announced_is_there(seed: int) -> None:
    """Whole chunks and tails that share blocks, several shards, descriptions that are forgotten."""
    rng = random.Random(seed)
    ledger = RouterLedger(9_000, lambda _: None)
    index, present = RouterIndex(), set[tuple[int, int, int]]()
    hashes: dict[int, list[BlockHash]] = {
        number: [b"%d-%d" % (number // 2, block) for block in range(4 if number % 2 else 2)]
        for number in range(10)
    }
    said = 0
    for _ in range(300):
        number, place, shard = rng.randrange(10), rng.randrange(-4, 3), rng.randrange(2)
        present ^= {(number, place, shard)}
        ledger.move(key_of(number, 0, shard), place, present=(number, place, shard) in present)
        if rng.random() < 0.05:  # a clear of all, or of a chunk
            store, cleared = rng.randrange(-4, 0), rng.choice([None, rng.randrange(10)])
            prefix = b"" if cleared is None else name_of(cleared)
            ledger.move(prefix, store, present=False)
            present -= {one for one in present if one[1] == store and cleared in (None, one[0])}
        if rng.random() < 0.5:
            described = rng.randrange(10)
            tokens = 10_000 * (described // 2)
            made = msgspec.msgpack.encode(
                StoredBlocks(
                    hashes[described],
                    None,
                    list(range(tokens, tokens + BLOCK * len(hashes[described]))),
                    BLOCK,
                    None,
                    None,
                    None,
                    group_idx=0,
                )
            )
            ledger.describe(ChunkDescription(name_of(described), 0, 2, [made]))
        events = ledger.changes()
        said += len(events)
        index.read(events)
        expected: dict[str, set[BlockHash]] = {"CPU": set(), "STORAGE": set(), "REMOTE": set()}
        for each in range(10):
            for medium, places in (("CPU", {0}), ("STORAGE", {1, 2}), ("REMOTE", range(-4, 0))):
                if ledger.has(name_of(each)) and all(
                    any((each, place, shard) in present for place in places) for shard in range(2)
                ):
                    expected[medium] |= set(hashes[each])
        assert index.blocks == expected
    assert said > 100
    assert 0 < ledger.nbytes <= 9_000 and len(ledger) < 10


def test_a_value_seen_in_a_store_waits_for_its_description(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_ledger, "_MOST_EARLY", 2)
    ledger, index = RouterLedger(1 << 20, lambda _: None), RouterIndex()
    for number in (1, 2, 3, 4):
        ledger.move(key_of(number), -1, present=True)
        ledger.move(key_of(number + 100), -1, present=False)
    ledger.move(key_of(3), -2, present=True)
    ledger.move(key_of(3), -1, present=False)
    for number in (1, 2, 3, 4):
        ledger.describe(describe(number, [number]))
    index.read(ledger.changes())
    assert index.blocks["REMOTE"] == {3, 4}, "the latest two"
    ledger.move(key_of(1), -1, present=True)
    index.read(ledger.changes())
    assert index.blocks["REMOTE"] == {1, 3, 4}
    ledger.forget_all()
    index.read(ledger.changes())
    assert index.blocks["REMOTE"] == set()
    ledger.describe(describe(1, [1]))
    assert ledger.changes() == []


def test_a_clear_of_a_store_takes_its_turn(start: Callable[..., RouterPublisher]) -> None:
    publisher = start(runs=False)
    publisher.describe([describe(number, [number]) for number in (1, 2)])
    publisher.note(key_of(2), -1, True)
    for number in (1, 2):
        publisher.note(key_of(number), -1, True)
    publisher.note(b"", -1, False)
    publisher.note(key_of(2), -1, True)
    publisher.start()
    settled(publisher)
    assert index_of(publisher).blocks["REMOTE"] == {2}
    publisher.note(name_of(2), -1, False)
    settled(publisher)
    assert index_of(publisher).blocks["REMOTE"] == set()


def test_a_subscriber_and_a_replay_have_the_same_batches(
    start: Callable[..., RouterPublisher],
) -> None:
    publisher = start(topic="kv@10.0.0.7@my-model")
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, 60_000)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.connect(publisher.address)
        heard: list[list[bytes]] = []
        for number in range(50):
            publisher.describe([describe(number, [2 * number, 2 * number + 1])])
            publisher.note(key_of(number), 0, True)
            if not heard:
                # it has joined when it hears the first one
                heard += [subscriber.recv_multipart()] if subscriber.poll(500) else []
        settled(publisher)
        last = publisher.status()["next_sequence"] - 1
        while int.from_bytes(heard[-1][1], "big") < last:
            heard.append(subscriber.recv_multipart())
    kept = replayed(publisher)
    assert [number for _, number, _ in kept] == list(range(last + 1))
    numbers = [int.from_bytes(each[1], "big") for each in heard]
    assert all(after == before + 1 for before, after in pairwise(numbers))
    assert [(topic, _batches.decode(payload)) for topic, _, payload in heard] == [
        (topic, batch) for topic, number, batch in kept if number >= numbers[0]
    ]
    assert kept[0][2].events == [ClearedBlocks()]
    assert replayed(publisher, last)[0][1] == last and replayed(publisher, last + 9) == []


def test_old_batches_are_not_kept(start: Callable[..., RouterPublisher]) -> None:
    publisher = start(replay_bytes=2000)
    for number in range(60):
        publisher.describe([describe(number, [number])])
        publisher.note(key_of(number), 0, True)
        settled(publisher)
    kept = replayed(publisher)
    assert 0 < publisher.status()["replay_bytes"] <= 2000
    assert kept and kept[0][1] > 0, "a router sees the gap"


def test_an_engine_is_asked_for_what_is_not_described(
    start: Callable[..., RouterPublisher],
) -> None:
    publisher = start()
    publisher.describe([describe(1, [b"long" * 8])])
    settled(publisher)
    assert publisher.undescribed(name_of(0) + name_of(1) + name_of(2)) == [0, 2]


def test_bad_descriptions_are_counted_and_the_rest_goes_on(
    start: Callable[..., RouterPublisher],
) -> None:
    publisher = start()
    odd = describe(0, [1])
    publisher.describe(
        [
            ChunkDescription(name_of(0), 0, 1, [b"\xc1"]),
            ChunkDescription(name_of(2), 0, 1, [msgspec.msgpack.encode({"type": "Other"})]),
            msgspec.structs.replace(odd, name=name_of(3), stored=[odd.stored[0], None]),
        ]
    )
    publisher.note(key_of(3), 0, True)
    settled(publisher)
    assert publisher.undescribed(name_of(0) + name_of(2) + name_of(3)) == [0, 1]
    assert publisher.metrics.as_dict()["kvhold_router_losses{reason=malformed}"] == 2


def test_too_many_changes_take_all_back(
    start: Callable[..., RouterPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = start()
    publisher.describe([describe(1, [1, 2])])
    publisher.note(key_of(1), 0, True)
    settled(publisher)
    assert index_of(publisher).blocks["CPU"] == {1, 2}
    monkeypatch.setattr(router_publisher, "_MOST_WAITING", 0)
    publisher.note(key_of(5), 0, True)
    monkeypatch.undo()
    settled(publisher)
    assert index_of(publisher).blocks["CPU"] == set()
    publisher.describe([describe(1, [1, 2])])
    publisher.note(key_of(1), 0, True)
    settled(publisher)
    assert index_of(publisher).blocks["CPU"] == {1, 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"publish": "tcp://0.0.0.0:0"}, r"events\.publish.*beyond loopback.*events\.insecure"),
        ({"publish": "tcp://*:0"}, r"events\.publish.*beyond loopback"),
        ({"replay": "tcp://192.0.2.1:0"}, r"events\.replay.*beyond loopback"),
        ({"publish": "127.0.0.1:0"}, r"events\.publish.*tcp://HOST:PORT"),
        ({"publish": "ipc://relative"}, r"events\.publish.*absolute path"),
        ({"publish": "ipc://{folder}/file"}, r"events\.publish.*no socket"),
    ],
)
def test_an_address_that_others_reach_is_refused(
    start: Callable[..., RouterPublisher], tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    (tmp_path / "file").write_text("mine")
    changes = {name: value.format(folder=tmp_path) for name, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        start(**changes)
    assert (tmp_path / "file").read_text() == "mine"


def test_beyond_loopback_if_it_is_asked_for(start: Callable[..., RouterPublisher]) -> None:
    assert start(publish="tcp://0.0.0.0:0", insecure=True).address.startswith("tcp://0.0.0.0:")


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_dynamos_indexer_knows_where_10000_chunks_are(
    start: Callable[..., RouterPublisher], tmp_path: Path
) -> None:
    rng = random.Random(1)
    publisher = start(publish="tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0")
    present: set[tuple[int, int]] = set()
    described = [describe(number, [2 * number + 1, 2 * number + 2]) for number in range(10_000)]
    with DynamoIndexer(tmp_path, block_size=BLOCK) as indexer:
        for first in range(0, 10_000, 2000):
            publisher.describe(described[first : first + 2000])
            for number in range(first, first + 2000):
                for place in (0, 1, -2):
                    if rng.random() < 0.7:
                        present.add((number, place))
                        publisher.note(key_of(number), place, True)
            for number, place in rng.sample(sorted(present), len(present) // 5):
                present.remove((number, place))
                publisher.note(key_of(number), place, False)
            if not first:
                # it asks for what it has missed
                indexer.follow(publisher.address, publisher.replay_address)
            settled(publisher)
        expected = {
            tier: {
                block
                for number, at in present
                if at == place
                for block in (2 * number + 1, 2 * number + 2)
            }
            for tier, place in (("host_pinned", 0), ("disk", 1))
        }
        end_s = time.monotonic() + 60
        while (found := indexer.blocks()) != expected:
            assert time.monotonic() < end_s, {
                tier: len(blocks ^ expected[tier]) for tier, blocks in found.items()
            }
            time.sleep(0.2)
        number = next(number for number, place in present if place == 1)
        tokens = list(range(10_000 * number, 10_000 * number + 2 * BLOCK))
        matched = indexer.matched_tokens(tokens)
        assert matched["disk"] == 2 * BLOCK
