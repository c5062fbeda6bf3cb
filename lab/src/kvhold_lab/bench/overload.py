import json
import os
import select
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvhold.core.checksums import BYTES
from kvhold.core.config import Config
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Query, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.store_options import StoreOptions
from kvhold.memory.slab import SLAB_BYTES, size_class
from kvhold.net import messages as m
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode, split_number
from kvhold.tiers.disk.folder import value_name
from kvhold_lab.bench.servers import serving

_GROUP = Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8")
WIDE = Namespace(model="bench, long", layout=Layout(groups=(_GROUP,) * 6), shards=8)
PLAIN = Namespace(model="bench", layout=Layout(groups=(_GROUP,)))
_RUNS = 5
_AT_ONCE = 1000
_PAGE_KEYS = 10_000
_PATIENCE_S = 600.0
_PACE_S = 0.05
_answers: Decoder[m.Answer | m.Welcome | m.News] = Decoder(m.Answer | m.Welcome | m.News)


@dataclass(frozen=True)
class OverloadRow:
    name: str
    value: float
    unit: str
    goal: float
    ok: bool


@dataclass(frozen=True)
class OverloadSizes:
    clients: int = 256
    chunks: int = 1_000_000
    long_tokens: int = 1_000_000
    storing: int = 64
    lookups: int = 100
    spin_s: float = 10.0


def rows(load: OverloadSizes) -> Iterator[OverloadRow]:
    yield from _turn_rows("longest pause of this machine", _longest_pause_s(load.spin_s))
    with tempfile.TemporaryDirectory(prefix="kvhold-overload-") as scratch:
        folder = Path(scratch) / "kv"
        _fill_disk(folder, load.chunks)
        yield from _disk_rows(folder, load)
        chunk_bytes = size_class(128)
        ram_bytes = (load.chunks + 64 * _AT_ONCE) * chunk_bytes + 64 * SLAB_BYTES
        settings = Path(scratch) / "kvhold.toml"
        lines = (
            'huge_pages = "never"',
            "event_buffer = 100000",
            "scrub_interval_s = 0",
            f'tiers = ["disk://{folder}?max_bytes=100GiB&read_only=true"]',
        )
        settings.write_text("\n".join(lines) + "\n")
        path = Path(scratch) / "node.sock"
        with (
            serving(["--config", str(settings), "--socket", str(path)], ram_bytes=ram_bytes),
            ExitStack() as stack,
        ):
            clients = [stack.enter_context(RawClient(path)) for _ in range(load.clients)]
            yield from _node_rows(clients, path, load)


def _node_rows(
    clients: list["RawClient"], path: Path, load: OverloadSizes
) -> Iterator[OverloadRow]:
    client = clients[0]
    for space in (WIDE, PLAIN):
        client.ask(m.Register(space.layout, space.digest))
    _until(
        lambda: (
            client.status()["arena_touched_bytes"]
            >= min(client.status()["arena_bytes"], 4 << 30) * 0.99
        )
    )
    before = client.status()["resident_bytes"]
    long, short = _store_all(client, load)
    num_chunks = client.status()["chunks"]
    yield _row(
        "memory's index",
        (client.status()["resident_bytes"] - before) / num_chunks,
        "bytes a chunk",
        1000,
    )

    def look_up_long() -> None:
        found = client.ask(m.Lookup(long))
        expected = len(long.hashes) // HASH_BYTES * WIDE.layout.tokens_per_chunk
        assert found.num_tokens == expected, (
            f"{found.num_tokens} of {expected} tokens were found: {found.reason}"
        )
        client.ask(m.Release(found.ticket))

    def snapshot() -> None:
        page, events = client.ask(m.Snapshot(0)), 0
        number = 1
        events += len(page.events)
        while page.more:
            page = client.ask(m.Snapshot(number))
            events += len(page.events)
            number += 1
        assert events == num_chunks, "all that is there, each once"

    def claim_long() -> None:
        found = client.ask(m.Lookup(long))
        leased = client.ask(m.Claim(found.ticket, 0, 0))
        client.ask(m.Release(found.ticket))
        client.ask(m.Release(leased.lease))

    num_keys = len(long.hashes) // HASH_BYTES * 48
    for name, work in (
        (f"longest turn, a lookup of {num_keys:,} keys", look_up_long),
        ("longest turn, a claim of its first shard", claim_long),
        ("longest turn, snapshot", snapshot),
        ("longest turn, status", lambda: client.ask(m.Status())),
    ):
        yield from _turn_rows(name, _median([client.longest_turn_s(work) for _ in range(_RUNS)]))
    yield from _stores_and_lookups(client, path, short, load)

    def clear() -> None:
        removed = client.ask(m.Clear(None)).count
        assert removed >= num_chunks
        assert not client.ask(m.Lookup(short)).num_tokens, "no read after clear"
        _until(lambda: client.status()["clearing_chunks"] == 0)

    yield from _turn_rows("longest turn, clear", client.longest_turn_s(clear))
    lost = sum(not each.is_served() for each in clients)
    yield _row("connections lost", lost, "connections", 0)


def _stores_and_lookups(
    client: "RawClient", path: Path, short: Query, load: OverloadSizes
) -> Iterator[OverloadRow]:
    code = (
        f"from kvhold_lab.bench.overload import store_steadily; store_steadily({str(path)!r}, "
        f"{load.storing})"
    )
    taken: list[float] = []

    def look_up() -> None:
        for _ in range(load.lookups):
            began_s = time.perf_counter()
            found = client.ask(m.Lookup(short))
            taken.append(time.perf_counter() - began_s)
            client.ask(m.Release(found.ticket))
            time.sleep(0.002)

    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as storing:
        assert storing.stdin is not None and storing.stdout is not None
        try:
            storing.stdout.readline()
            turns_s = [client.longest_turn_s(look_up) for _ in range(_RUNS)]
        finally:
            storing.stdin.close()
        stored = storing.stdout.read()
    tokens = len(short.hashes) // HASH_BYTES * PLAIN.layout.tokens_per_chunk
    yield _row(
        f"p99 of a lookup of {tokens:,} tokens, {load.storing} engines store",
        1e3 * float(np.percentile(taken, 99)),
        "ms",
        10,
    )
    yield from _turn_rows("longest turn, lookups and stores", _median(turns_s))
    yield _row("refused stores", float(json.loads(stored)["refused"]), "stores", 0)


def store_steadily(path: str, count: int) -> None:
    """A process's entry point. Ends with standard input."""
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(Path(path))) for _ in range(count)]
        sys.stdout.write("\n")
        sys.stdout.flush()
        refused, due_s = 0, time.perf_counter()
        while not select.select([0], [], [], 0)[0]:
            for client in clients:
                refused += not store_unwritten(client, PLAIN, fresh_names(PLAIN, 8), 0)
                due_s += _PACE_S / count
                time.sleep(max(0.0, due_s - time.perf_counter()))
        sys.stdout.write(json.dumps({"refused": refused}))


def _store_all(client: "RawClient", load: OverloadSizes) -> tuple[Query, Query]:
    size = WIDE.layout.tokens_per_chunk
    long = fresh_names(WIDE, load.long_tokens // size)
    for shard in range(WIDE.shards):
        for names in _parts(long, _AT_ONCE // 6):
            assert store_unwritten(client, WIDE, names, shard)
    left = load.chunks - len(long) * 6 * WIDE.shards
    short = fresh_names(PLAIN, 32_000 // size)
    assert store_unwritten(client, PLAIN, short, 0)
    for _ in range(max(0, left) // _AT_ONCE):
        assert store_unwritten(client, PLAIN, fresh_names(PLAIN, _AT_ONCE), 0)
    return query_of(WIDE, long), query_of(PLAIN, short)


def store_unwritten(client: "RawClient", space: Namespace, names: ChunkNames, shard: int) -> bool:
    options = StoreOptions(tenant=space.tenant)
    granted = client.ask(m.Reserve(space.layout.fingerprint, names, shard, options))
    if not granted.reservation:
        return False
    checksums = bytes(BYTES * len(names) * len(space.layout.groups))
    client.ask(m.Commit(granted.reservation, list(range(len(names))), checksums))
    return True


def fresh_names(space: Namespace, num_chunks: int) -> ChunkNames:
    return ChunkNames(space.digest, os.urandom(num_chunks * HASH_BYTES))


def _parts(names: ChunkNames, most: int) -> Iterator[ChunkNames]:
    for at in range(0, len(names), most):
        yield ChunkNames(names.namespace, names.hashes[at * HASH_BYTES : (at + most) * HASH_BYTES])


def query_of(space: Namespace, names: ChunkNames) -> Query:
    fingerprint = space.layout.fingerprint
    return Query(space.digest, fingerprint, space.shards, names.hashes, tenant=space.tenant)


def _fill_disk(folder: Path, num_chunks: int) -> None:
    folder.mkdir(mode=0o700)
    for shard in range(256):
        (folder / f"{shard:02x}").mkdir(mode=0o700)
    stamp_ns = time.time_ns() - num_chunks
    for number in range(num_chunks):
        key = make_key(PLAIN.digest, os.urandom(HASH_BYTES), 0, 0)
        file = os.open(
            folder / value_name(key, 1, stamp_ns + number),
            os.O_WRONLY | os.O_CREAT | os.O_EXCL,
            0o600,
        )
        os.write(file, b"x")
        os.close(file)


def _disk_rows(folder: Path, load: OverloadSizes) -> Iterator[OverloadRow]:
    opened = _measured_apart("open_disk", folder)
    assert opened["found"], "a value that is there was found"
    yield _row(f"a disk of {load.chunks:,} chunks serves", opened["serves_s"], "s", 2)
    yield _row("the disk's index", opened["index_bytes"] / load.chunks, "bytes a chunk", 150)
    scanned = [_measured_apart("scan_store", folder) for _ in range(_RUNS)]
    assert all(each["keys"] == load.chunks for each in scanned), "all that is there, each once"
    for name, what in (("a folder is listed", "listing"), ("a central store's scan", "scan")):
        yield from _turn_rows(f"longest turn, {name}", _median([each[what] for each in scanned]))


def _measured_apart(function: str, folder: Path) -> dict[str, Any]:
    code = f"from kvhold_lab.bench.overload import {function}; {function}({str(folder)!r})"
    measured: dict[str, Any] = json.loads(
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    )
    return measured


class _TurnTimer(selectors.DefaultSelector):
    """A turn is from the end of one wait to the start of the next."""

    def __init__(self) -> None:
        super().__init__()
        self._began = (0.0, 0.0)
        self.longest = (0.0, 0.0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wall_s, cpu_s = _now()
        self.longest = (
            max(self.longest[0], wall_s - self._began[0]),
            max(self.longest[1], cpu_s - self._began[1]),
        )
        ready = super().select(timeout)
        self._began = _now()
        return ready

    def take_longest(self) -> tuple[float, float]:
        longest, self.longest = self.longest, (0.0, 0.0)
        return longest


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def scan_store(folder: str) -> None:
    import asyncio

    from kvhold.node.central_store import CentralStore
    from kvhold.node.pauses import avoid_pauses

    turns = _TurnTimer()

    async def measure() -> dict[str, Any]:
        tiers = (f"disk://{folder}?max_bytes=100GiB&read_only=true",)
        central_store = CentralStore(Config(ram_bytes=64 << 20, huge_pages="never", tiers=tiers))
        await central_store.start()
        await asyncio.sleep(0)
        turns.take_longest()
        await scan(central_store)
        await asyncio.sleep(0)
        listing = turns.take_longest()
        num_keys = await scan(central_store)
        await asyncio.sleep(0)
        measured = {"keys": num_keys, "listing": listing, "scan": turns.take_longest()}
        await central_store.close()
        return measured

    async def scan(central_store: CentralStore) -> int:
        page = await central_store.scans.page(b"", b"", _PAGE_KEYS)
        num_keys = len(page.keys)
        while page.more:
            page = await central_store.scans.page(b"", page.keys[-1], _PAGE_KEYS)
            num_keys += len(page.keys)
        return num_keys

    avoid_pauses()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        sys.stdout.write(json.dumps(runner.run(measure())))


def open_disk(folder: str) -> None:
    import asyncio

    from kvhold.tiers.disk import DiskConfig, DiskTier

    shard = next(
        entry
        for entry in sorted(Path(folder).iterdir())
        if entry.name != "new" and any(entry.iterdir())
    )
    key = bytes.fromhex(next(shard.iterdir()).name.partition("-")[0])

    async def measure() -> dict[str, Any]:
        tier = DiskTier(DiskConfig(path=folder, max_bytes=100 << 30))
        began_s = time.perf_counter()
        size = (await tier.probe([key]))[0]
        serves_s = time.perf_counter() - began_s
        async for _ in tier.scan(b""):
            pass
        index_bytes = tier.index_bytes
        await tier.close()
        return {"found": size == 1, "serves_s": serves_s, "index_bytes": index_bytes}

    sys.stdout.write(json.dumps(asyncio.run(measure())))


def _row(name: str, value: float, unit: str, goal: float) -> OverloadRow:
    return OverloadRow(name, round(value, 3), unit, goal, value <= goal)


def _longest_pause_s(duration_s: float) -> tuple[float, float]:
    longest_s = longest_cpu_s = 0.0
    now_s, now_cpu_s = time.perf_counter(), time.thread_time()
    until_s = now_s + duration_s
    while now_s < until_s:
        before_s, before_cpu_s = now_s, now_cpu_s
        now_s, now_cpu_s = time.perf_counter(), time.thread_time()
        longest_s = max(longest_s, now_s - before_s)
        longest_cpu_s = max(longest_cpu_s, now_cpu_s - before_cpu_s)
    return longest_s, longest_cpu_s


def _median(turns_s: Sequence[tuple[float, float]]) -> tuple[float, float]:
    wall_s, cpu_s = np.median(turns_s, axis=0)
    return float(wall_s), float(cpu_s)


def _turn_rows(name: str, longest_s: tuple[float, float]) -> Iterator[OverloadRow]:
    yield _row(name, 1e3 * longest_s[0], "ms", 2)
    yield _row(f"{name}: of its thread", 1e3 * longest_s[1], "ms", 2)


def _until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"the node did not get there within {_PATIENCE_S:.0f} s")
        time.sleep(0.05)


class RawClient:
    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(600)
        self._socket.connect(str(path))
        self._number = 0
        self._socket.sendall(encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "overload", os.getpid())))
        welcome = _answers.decode(self._read(body_length(self._read(LENGTH_BYTES))))
        assert isinstance(welcome, m.Welcome), welcome

    def ask(self, request: m.Message) -> Any:
        self._number += 1
        self._socket.sendall(encode(request, self._number))
        while True:
            number, body = split_number(self._read(body_length(self._read(LENGTH_BYTES))))
            answer = _answers.decode(body)
            if number == self._number:
                assert not isinstance(answer, m.Refused), answer
                return answer

    def status(self) -> dict[str, Any]:
        values: dict[str, Any] = self.ask(m.Status()).values
        return values

    def longest_turn_s(self, work: Callable[[], object]) -> tuple[float, float]:
        self.status()
        longest: list[tuple[float, float]] = []

        def look() -> dict[str, Any]:
            status = self.status()
            longest.append(
                (
                    status["loop"]["recent_longest_turn_s"],
                    status["loop"]["recent_longest_turn_cpu_s"],
                )
            )
            return status

        work()
        _until(lambda: look()["pinned_chunks"] == 0)
        look()
        return max(wall_s for wall_s, _ in longest), max(cpu_s for _, cpu_s in longest)

    def is_served(self) -> bool:
        try:
            return isinstance(self.ask(m.Ping()), m.Done)
        except (OSError, AssertionError):
            return False

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _read(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self._socket.recv(nbytes - len(data))
            assert more, "the node closed the connection"
            data += more
        return bytes(data)
