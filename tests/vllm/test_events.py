"""KV events: what a router learns of kvhold's memory from vLLM's own events is what is there, and
vLLM would say the same of it.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import msgspec
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvhold.cache.local import open_cache
from kvhold.core.api import Event
from kvhold.core.config import ClientConfig, load_config
from kvhold.core.keys import make_key, place_suffix
from kvhold.integrations.vllm import events as events_module
from kvhold.integrations.vllm.events import Announced, Announcer, ChunkTable, Described, with_events
from kvhold.integrations.vllm.naming import adapters
from kvhold.node import NodeClient
from tests.vllm.router import Block, Router
from tests.vllm.scheduling import Engine, NodeProcess, Options, eventually, make_config, make_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

BLOCK, CHUNK = 16, 64
IMPATIENT = {
    "client": {
        "call_timeout_s": 20,
        "connect_timeout_s": 2.0,
        "reconnect_interval_s": 0.05,
        "heartbeat_interval_s": 0.2,
    }
}
TABLES = (ChunkTable(0, 16, "full_attention", None), ChunkTable(1, 16, "sliding_window", 64))
SHARDS = 2


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_PACE_S", 0.0)
    monkeypatch.setattr(events_module, "_RETRY_S", 0.0)


@pytest.fixture
def start_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def start(*, ram: str = "64MiB", events: int = 100_000) -> NodeProcess:
        monkeypatch.setenv("KVHOLD_EVENT_BUFFER", str(events))
        nodes.append(NodeProcess(tmp_path / "node.sock", ram=ram))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


class Followed:
    """An engine whose events a router reads, as the scheduler hands them out."""

    def __init__(self, folder: Path, node: NodeProcess, **options: Any) -> None:
        self.engine = Engine(Options(folder, events=True, **options), node.socket)
        self.side = self.engine.connector.scheduler
        self.node = node
        self.router = Router()
        self.engine.scheduler.kv_event_publisher = self
        self.texts: dict[str, tuple[list[int], dict[str, Any]]] = {}

    def publish(self, batch: KVEventBatch) -> None:
        self.router.read(batch.events)

    def shutdown(self) -> None:
        """Of vLLM's publisher."""

    def compute(self, prompt: list[int], **changes: Any) -> None:
        name = f"request-{len(self.texts)}"
        self.texts[name] = (prompt, changes)
        self.engine.add(name, prompt, max_tokens=1, **changes)
        self.engine.run()

    def there(self) -> set[Block]:
        """The blocks of all texts so far that the node's memory holds, by its own account."""
        with NodeClient(self.node.socket, ClientConfig(), name="test") as client:
            keys = {event.key for event in client.snapshot().events}
        found: set[Block] = set()
        for number, (prompt, changes) in enumerate(self.texts.values()):
            adapter = changes.get("lora_request")
            lora = next(
                (
                    name
                    for key, name in self.side._adapters.names().items()
                    if adapter and key[1] == adapter.lora_name
                ),
                "",
            )
            space = self.side._namespace.narrowed(
                lora=lora, cache_salt=changes.get("cache_salt", "")
            )
            names = space.prompt(prompt).chunks()
            # for its hashes alone
            request = self.engine.add(
                f"named-{number}-{len(self.engine.outputs)}", prompt, **changes
            )
            self.engine.abort(request.request_id)
            end = 0
            for chunk, num_tokens in enumerate(names.num_tokens(space.layout).tolist()):
                begin, end = end, end + num_tokens
                if (
                    make_key(names.namespace, names.hashes[20 * chunk : 20 * chunk + 20], 0, 0)
                    in keys
                ):
                    hashes = request.block_hashes[begin // BLOCK : end // BLOCK]
                    found |= {(0, maybe_convert_block_hash(each)) for each in hashes}
        return found

    def read(self) -> Router:
        """The router, which has read all events by now."""
        self.router.read(self.engine.connector.take_events())
        return self.router

    def settles(self) -> bool:
        """Whether the router knows what is there."""
        return self.read().held == self.there()


@pytest.fixture
def follow(folder: Path) -> Iterator[Callable[..., Followed]]:
    made: list[Followed] = []

    def make(node: NodeProcess, **options: Any) -> Followed:
        made.append(Followed(folder, node, **options))
        return made[-1]

    yield make
    for followed in made:
        followed.engine.run()
        followed.engine.close()


def test_a_router_knows_what_is_in_a_memory_that_is_too_small(
    follow: Callable[..., Followed], start_node: Callable[..., NodeProcess]
) -> None:
    followed = follow(start_node(ram="1MiB"))
    rng = random.Random(5)
    prompts: list[list[int]] = []
    for number in range(40):
        shared = rng.choice(prompts)[: rng.randrange(400)] if prompts and rng.random() < 0.6 else []
        prompts.append(shared + make_prompt(("events", number), rng.randrange(1, 400)))
        followed.compute(prompts[-1])
        if number % 8 == 7:
            eventually(followed.settles)
    router = followed.router
    assert router.held and router.removed > 200, "there was eviction"
    texts = {
        tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)
    }
    assert {router.text_of(*block) for block in router.held} <= texts
    assert router.gpu, "vLLM's own events are there, too"


def test_ours_say_of_a_block_what_vllm_says(
    follow: Callable[..., Followed],
    start_node: Callable[..., NodeProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With adapters and salts, and for what is generated.

    The router fails for a block that is told in two ways.
    """
    # the adapter counts as older than the engine
    monkeypatch.setattr(adapters, "MARGIN_NS", -(10**18))
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    followed = follow(start_node(), settings={"save_decode": True})
    prompt = make_prompt("kinds", 200)
    for changes in (
        {},
        {"cache_salt": "alice"},
        {"lora_request": LoRARequest("tuned", 1, str(tmp_path))},
    ):
        followed.compute(prompt, **changes)
        eventually(followed.settles)
    assert len(followed.router.held) == 3 * 12
    assert followed.router.held <= followed.router.gpu
    said = [followed.router.said[block] for block in followed.router.held]
    assert sum(each.lora_name == "tuned" and each.extra_keys == ("tuned",) for each in said) == 12
    assert sum(each.extra_keys == ("alice",) for each in said) == 1, (
        "the salt stands in the first block alone"
    )
    followed.engine.add("long", prompt, max_tokens=100)
    followed.engine.run()
    eventually(lambda: len(followed.read().held) == 3 * 12 + 6)
    assert followed.router.held <= followed.router.gpu


def test_another_engine_tells_of_what_it_finds(
    follow: Callable[..., Followed], start_node: Callable[..., NodeProcess]
) -> None:
    node = start_node()
    first, second = follow(node), follow(node)
    prompt = make_prompt("both", 3 * CHUNK + 2 * BLOCK + 5)  # its tail may end at two places
    first.compute(prompt)
    eventually(first.settles)
    assert second.router.held == set()
    second.compute(prompt)
    eventually(second.settles)
    assert second.router.held == first.router.held
    assert len(first.router.held) == 14


def test_with_the_node_all_goes_and_comes_again_as_it_is_used(
    follow: Callable[..., Followed],
    start_node: Callable[..., NodeProcess],
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = start_node()
    followed = follow(node, settings=IMPATIENT)
    prompt = make_prompt("lost", 200)
    followed.compute(prompt)
    eventually(followed.settles)
    assert followed.router.held
    node.kill()
    eventually(lambda: not followed.read().held)
    clients = [followed.side._cache, followed.engine.hands.client]
    # both have noticed: a store on a dead connection is dropped
    eventually(lambda: not any(client.connected for client in clients))
    followed.node = start_node()
    eventually(lambda: all(client.connected for client in clients))
    assert followed.engine.scheduler.reset_prefix_cache()
    followed.compute(prompt)
    eventually(lambda: followed.settles() and followed.router.held)


def test_events_that_the_node_has_forgotten_are_made_up_for(
    follow: Callable[..., Followed],
    start_node: Callable[..., NodeProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = follow(start_node(ram="1MiB", events=3))
    snapshots = []
    ask = followed.side._cache.snapshot

    def snapshot() -> Any:
        snapshots.append(1)
        return ask()

    monkeypatch.setattr(followed.side._cache, "snapshot", snapshot)
    for number in range(12):
        followed.compute(make_prompt(("forgotten", number), 300))
    eventually(followed.settles)
    assert followed.router.removed and len(snapshots) > 1


def test_after_a_reset_nothing_is_announced(
    follow: Callable[..., Followed], start_node: Callable[..., NodeProcess]
) -> None:
    """Nor what the node keeps: of a tenant's salt it is not told to clear anything."""
    followed = follow(start_node())
    prompt = make_prompt("reset", 200)
    for salt in (None, "alice"):
        followed.compute(prompt, **({"cache_salt": salt} if salt else {}))
    eventually(followed.settles)
    assert len(followed.router.held) == 2 * 12
    assert followed.engine.scheduler.reset_prefix_cache(reset_connector=True)
    eventually(lambda: not followed.read().held)
    followed.compute(prompt)
    eventually(lambda: followed.settles() and followed.router.held)


def test_an_engine_that_publishes_nothing_asks_nothing(
    folder: Path, start_node: Callable[..., NodeProcess]
) -> None:
    engine = Engine(Options(folder), start_node().socket)
    engine.add("a", make_prompt("quiet", 200))
    engine.run()
    assert engine.connector.take_events() == []
    assert engine.connector.scheduler._announcer is None
    engine.close()


def test_a_node_that_keeps_no_events_is_said_once(
    follow: Callable[..., Followed],
    start_node: Callable[..., NodeProcess],
    caplog: pytest.LogCaptureFixture,
) -> None:
    followed = follow(start_node(events=0))
    for number in range(3):
        followed.compute(make_prompt(("none", number), 200))
    announcer = followed.side._announcer
    assert announcer is not None and announcer._pending_events is not None
    announcer._pending_events.result()
    assert followed.router.held == set()
    assert len([record for record in caplog.records if "event_buffer" in record.getMessage()]) == 1


def test_a_node_that_is_started_for_an_engine_with_events_keeps_them(
    folder: Path, tmp_path: Path
) -> None:
    asked, plain = (
        make_config(Options(folder, events=events), tmp_path / "none.sock")
        for events in (True, False)
    )
    assert with_events(load_config({}), asked).event_buffer > 0
    assert with_events(load_config({"event_buffer": 7}), asked).event_buffer == 7
    assert with_events(load_config({}), plain).event_buffer == 0


class TestAnnounced:
    """The index alone: several groups and shards, chunks that share blocks, events in any order."""

    NAMES = tuple(bytes([number]) * 36 for number in range(12))

    def described(self, number: int) -> Described:
        """Chunks 0 to 3 are whole, 4 to 7 their tails, 8 to 11 the same texts of another tenant:
        all but three blocks are shared.
        """
        whole = number % 4
        hashes = [bytes([whole, block]) for block in range(2 if 4 <= number < 8 else 4)]
        stored = [
            BlockStored(
                hashes,
                None,
                list(range(16 * len(hashes))),
                16,
                None,
                "CPU",
                None,
                group_idx=table.number,
                locality="LOCAL",
            )
            for table in TABLES
        ]
        return Described(64 * whole, (stored[0], stored[1] if whole else None))

    def expected(self, present: set[tuple[int, int, int]]) -> set[Block]:
        whole = {
            (n, group)
            for n, group, _ in present
            if all((n, group, shard) in present for shard in range(SHARDS))
        }
        described = [(self.described(n).stored[group], group) for n, group in whole]
        return {
            (group, block)
            for stored, group in described
            if stored is not None
            for block in stored.block_hashes
        }

    @pytest.mark.parametrize("seed", range(20))
    def test_what_is_told_is_what_is_there(self, seed: int) -> None:
        rng = random.Random(seed)
        announced, router, present = (
            Announced(TABLES, SHARDS),
            Router(),
            set[tuple[int, int, int]](),
        )
        for _ in range(150):
            happened = []
            for _ in range(rng.randrange(12)):
                one = (rng.randrange(12), rng.randrange(2), rng.randrange(SHARDS))
                kind = (
                    rng.choice(["evicted", "expired", "cleared"]) if one in present else "admitted"
                )
                present ^= {one}
                happened.append(
                    Event(
                        0,
                        kind,
                        self.NAMES[one[0]] + place_suffix(one[1], one[2]),
                        "ram",
                        64,
                        0,
                        b"",
                    )
                )
            if rng.random() < 0.2:
                announced.replace(
                    [
                        Event(0, "admitted", self.NAMES[n] + place_suffix(g, s), "ram", 64, 0, b"")
                        for n, g, s in present
                    ]
                )
            else:
                announced.happened(happened)
            if rng.random() < 0.05:
                announced.withdraw()
                router.read(announced.changes())
                assert router.held == set()
                announced.replace(
                    [
                        Event(0, "admitted", self.NAMES[n] + place_suffix(g, s), "ram", 64, 0, b"")
                        for n, g, s in present
                    ]
                )
            for number, name in enumerate(self.NAMES):
                if announced.wants(name):
                    announced.describe(name, self.described(number))
            router.read(announced.changes())
            assert router.held == self.expected(present)
        assert router.removed > 100
        assert not announced.changes()

    def test_a_beginning_is_told_before_what_follows(self) -> None:
        announced = Announced(TABLES, 1)
        for number in (3, 1, 2, 0):
            announced.describe(self.NAMES[number], self.described(number))
            announced.happened(
                [Event(0, "admitted", self.NAMES[number] + place_suffix(0, 0), "ram", 64, 0, b"")]
            )
        assert [event.block_hashes[0][0] for event in announced.changes()] == [0, 1, 2, 3]

    def test_a_chunk_that_is_stored_again_before_its_eviction_was_read_is_told(self) -> None:
        announced, router, name = Announced(TABLES, 1), Router(), self.NAMES[1]
        happened = {
            kind: [
                Event(0, kind, name + place_suffix(group, 0), "ram", 64, 0, b"")
                for group in range(len(TABLES))
            ]
            for kind in ("admitted", "evicted")
        }
        announced.describe(name, self.described(1))
        announced.happened(happened["admitted"])
        router.read(announced.changes())
        held = set(router.held)
        assert held and not announced.wants(name) and announced.lacks(name)
        announced.describe(name, self.described(1))  # a request is about to store it
        router.read(announced.changes())
        announced.happened(happened["evicted"])
        router.read(announced.changes())
        assert not router.held
        announced.happened(happened["admitted"])
        router.read(announced.changes())
        assert router.held == held
        assert announced.lacks(name), "it is kept no longer than it is needed"

    def test_what_is_described_and_never_comes_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events_module, "_MOST_DESCRIBED", 5)
        announced = Announced(TABLES, 1)
        for number, name in enumerate(self.NAMES):
            announced.describe(name, self.described(number))
        assert [announced.wants(name) for name in self.NAMES] == [True] * 7 + [False] * 5


def test_the_scheduler_waits_for_no_question() -> None:
    """`take` while the thread of the lookups is busy: nothing now, all of it later, and one
    question at a time.
    """
    with (
        ThreadPoolExecutor(1) as thread,
        open_cache(ram_bytes="2MiB", huge_pages="never", event_buffer=10) as cache,
    ):
        announcer = Announcer(cache, thread, events_module.Describer(None, 1, TABLES[:1], 16))  # type: ignore[arg-type]
        busy = Flag()
        thread.submit(busy.wait)
        try:
            taken, waiting = [announcer.take() for _ in range(3)], thread._work_queue.qsize()
        finally:
            busy.set()
        assert (taken, waiting) == ([[], [], []], 1)
        assert announcer._pending_events is not None
        assert announcer._pending_events.result() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_real_engine_publishes_what_is_in_memory(name: str, tmp_path: Path) -> None:
    """Over ZMQ, as a router reads it; RAM is too small for the prompts. gemma3 has groups with a
    window beside full attention.
    """
    from kvhold_lab.checkpoints import make_checkpoint

    prompts: list[list[int]] = []
    for number in range(24):
        shared = prompts[number // 2][:200] if number % 3 == 1 else []
        prompts.append(
            shared
            + [1 + token % 200 for token in make_prompt((name, number), 150 + 37 * (number % 9))]
        )
    prompts += prompts[::5]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    socket, publish, replay = (tmp_path / each for each in ("n.sock", "p", "r"))
    command = [
        sys.executable,
        "-m",
        "tests.vllm.events_engine",
        str(make_checkpoint(name).path),
        str(tmp_path / "prompts.json"),
        str(socket),
    ]
    command += [f"ipc://{publish}", f"ipc://{replay}"]
    with (
        (tmp_path / "err").open("w") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process,
    ):
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            line = next((line for line in lines if line.startswith("[[")), "")
            assert line, (tmp_path / "err").read_text()[-3000:]
            present = {(group, tuple(text)) for group, text in json.loads(line)}
            router = Router()
            for batch in replayed(f"ipc://{replay}"):
                router.read(batch.events)
        finally:
            process.communicate("\n")
            if socket.exists():
                with NodeClient(socket, ClientConfig(), name="test") as client:
                    client.stop_node()
    assert process.returncode == 0
    assert {(group, router.text_of(group, block)) for group, block in router.held} == present
    assert len({group for group, _ in present}) == (1 if name == "llama" else 3)
    assert router.removed > 50


def replayed(endpoint: str) -> Iterator[KVEventBatch]:
    """All batches from the first one on, as vLLM keeps them for routers that come late."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while True:
            payload = socket.recv_multipart()[-1]
            if not payload:
                return
            yield decoder.decode(payload)
