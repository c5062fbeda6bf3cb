import asyncio
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from kvhold.cache import LocalCache
from kvhold.core.config import load_config
from kvhold.core.keys import HASH_BYTES, KEY_BYTES, Namespace
from kvhold.core.layout import Group, Layout
from kvhold.tiers.base import Tier
from kvhold.tiers.registry import make_tier
from kvhold_lab.bench.limits import RawFiles, RawRedis, RawSocket

VALUE_BYTES = 8 << 20
NUM_VALUES = 16
ROUNDS = 5
CHECK_ROUNDS = 41
LOOKUP_CHUNKS = 125
MIB = 1 << 20

Work = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class TierRow:
    """unit: MB/s, or calls/s for a lookup"""

    tier: str
    op: str
    mb_s: float
    limit_mb_s: float
    ratio: float
    unit: str = "MB/s"
    limit: str = ""


class Memory:
    def __init__(self) -> None:
        num_values, value_bytes = NUM_VALUES, VALUE_BYTES
        total = num_values * value_bytes
        self.source, self.target = (memoryview(mmap.mmap(-1, total)) for _ in range(2))
        self.source[:] = os.urandom(MIB) * (total // MIB)
        self.target[:] = bytes(total)
        self.values = [self.source[at : at + value_bytes] for at in range(0, total, value_bytes)]
        self.into = [self.target[at : at + value_bytes] for at in range(0, total, value_bytes)]
        self.keys = [
            bytes(16) + os.urandom(HASH_BYTES) + bytes(KEY_BYTES - 16 - HASH_BYTES)
            for _ in range(num_values)
        ]
        self.nbytes = total


async def disk_rows(where: Path | None = None) -> list[TierRow]:
    folder = Path(tempfile.mkdtemp(prefix="kvhold-bench-", dir=where))
    memory = Memory()
    try:
        tier, _ = make_tier(f"disk://{folder}/kv?max_bytes=4GiB")
        raw = {}
        for name, direct in (("O_DIRECT", True), ("page cache", False)):
            (folder / name).mkdir()
            raw[name] = RawFiles(folder / name, memory.values, threads=4, direct=direct)
        puts: dict[str, Work] = {"kvhold": lambda: _put(tier, memory)}
        gets: dict[str, Work] = {"kvhold": lambda: _get(tier, memory)}
        for name, files in raw.items():
            puts[name] = _threaded(files.write)
            gets[name] = _threaded(lambda files=files: files.read(memory.into))  # type: ignore[misc]
        put_s = await _in_turn(puts, before={"kvhold": lambda: tier.delete(memory.keys)})
        get_s = await _in_turn(gets)
        rows = [
            _row("disk", op, memory.nbytes, seconds, limit)
            for limit in raw
            for op, seconds in (("put", put_s), ("get", get_s))
        ]
        rows.append(await _lookup_row("disk", tier, memory))
        await tier.close()
        rows.append(await _checks_row("disk", f"disk://{folder}/retrieved?max_bytes=4GiB"))
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def redis_rows() -> list[TierRow]:
    import redis
    import redis.asyncio

    from kvhold_lab.servers.redis import RedisServer

    memory = Memory()
    with RedisServer(password="right") as server:
        tier, _ = make_tier(f"redis://:right@127.0.0.1:{server.port}/0")
        raw = RawRedis(server.port, "right", memory.values, connections=4)
        plain = redis.Redis(port=server.port, password="right")
        library = redis.asyncio.Redis(port=server.port, password="right")

        def plain_set() -> None:
            for at, value in enumerate(memory.values):
                plain.set(f"l{at}", value)

        def plain_get() -> None:
            for at, into in enumerate(memory.into):
                into[:] = _bytes(plain.get(f"l{at}"))

        async def library_set() -> None:
            await asyncio.gather(
                *(library.set(f"l{at}", value) for at, value in enumerate(memory.values))
            )

        async def library_get() -> None:
            async def one(at: int) -> None:
                memory.into[at][:] = _bytes(await library.get(f"l{at}"))

            await asyncio.gather(*(one(at) for at in range(len(memory.into))))

        puts: dict[str, Work] = {
            "kvhold": lambda: _put(tier, memory),
            "raw sockets": _threaded(raw.set),
            "redis-py": _threaded(plain_set),
            "redis-py, 16 at once": library_set,
        }
        gets: dict[str, Work] = {
            "kvhold": lambda: _get(tier, memory),
            "raw sockets": _threaded(lambda: raw.get(memory.into)),
            "redis-py": _threaded(plain_get),
            "redis-py, 16 at once": library_get,
        }
        put_s = await _in_turn(puts, before={"kvhold": lambda: tier.delete(memory.keys)})
        get_s = await _in_turn(gets)
        rows = [
            _row("redis", op, memory.nbytes, seconds, limit)
            for limit in ("raw sockets", "redis-py", "redis-py, 16 at once")
            for op, seconds in (("put", put_s), ("get", get_s))
        ]
        rows.append(await _lookup_row("redis", tier, memory))
        await tier.delete(memory.keys)
        await library.flushdb()
        rows.append(
            await _checks_row(
                "redis", f"redis://:right@127.0.0.1:{server.port}/0?prefix=retrieved:"
            )
        )
        raw.close()
        await library.aclose()
        plain.close()
        await tier.close()
    return rows


async def s3_rows() -> list[TierRow]:
    from kvhold.tiers.s3_store import S3Config, open_store
    from kvhold_lab.servers.s3 import MotoServer

    memory = Memory()
    with MotoServer() as server:
        server.create_bucket("bench")
        tier, _ = make_tier(server.url("bench/kv"))
        store = open_store(
            S3Config(
                bucket="bench",
                prefix="raw",
                endpoint=f"http://127.0.0.1:{server.port}",
                access_key_id=server.access_key_id,
                secret_access_key=server.secret_access_key,
            )
        )

        async def bare_put() -> None:
            await asyncio.gather(
                *(
                    store.put_async(f"o{at}", value, use_multipart=False)
                    for at, value in enumerate(memory.values)
                )
            )

        async def bare_get() -> None:
            async def one(at: int) -> None:
                memory.into[at][:] = memoryview(
                    await store.get_range_async(f"o{at}", start=0, length=VALUE_BYTES)
                )

            await asyncio.gather(*(one(at) for at in range(len(memory.into))))

        put_s = await _in_turn(
            {"kvhold": lambda: _put(tier, memory), "obstore": bare_put},
            before={"kvhold": lambda: tier.delete(memory.keys)},
        )
        get_s = await _in_turn({"kvhold": lambda: _get(tier, memory), "obstore": bare_get})
        rows = [
            _row("s3", "put", memory.nbytes, put_s, "obstore"),
            _row("s3", "get", memory.nbytes, get_s, "obstore"),
        ]
        await tier.close()
    return rows


async def central_rows() -> list[TierRow]:
    from kvhold_lab.servers.central import CentralServer

    memory = Memory()
    with (
        CentralServer(ram_bytes="1GiB") as server,
        RawSocket(memory.values, receive=True) as sink,
        RawSocket(memory.values, receive=False) as source,
    ):
        tier, _ = make_tier(server.url)
        puts = {"kvhold": lambda: _put(tier, memory), "TCP": _threaded(sink.send)}
        gets = {
            "kvhold": lambda: _get(tier, memory),
            "TCP": _threaded(lambda: source.receive(memory.into)),
        }
        put_s = await _in_turn(puts, before={"kvhold": lambda: tier.delete(memory.keys)})
        get_s = await _in_turn(gets)
        rows = [
            _row("kvhold", "put", memory.nbytes, put_s, "TCP"),
            _row("kvhold", "get", memory.nbytes, get_s, "TCP"),
        ]
        rows.append(await _lookup_row("kvhold", tier, memory))
        await tier.close()
    return rows


TIERS: dict[str, Callable[[], Coroutine[None, None, list[TierRow]]]] = {
    "disk": disk_rows,
    "redis": redis_rows,
    "s3": s3_rows,
    "kvhold": central_rows,
}


def rows(tier: str, *, where: Path | None = None) -> list[TierRow]:
    return asyncio.run(disk_rows(where) if tier == "disk" else TIERS[tier]())


async def _put(tier: Tier, memory: Memory) -> None:
    faults = await tier.put(
        [(key, [value]) for key, value in zip(memory.keys, memory.values, strict=True)]
    )
    assert not any(faults), faults


async def _get(tier: Tier, memory: Memory) -> None:
    sizes = await tier.get(memory.keys, [[into] for into in memory.into])
    assert sizes == [len(value) for value in memory.values], sizes


async def _lookup_row(name: str, tier: Tier, memory: Memory) -> TierRow:
    keys = [memory.keys[0][:-8] + number.to_bytes(8, "little") for number in range(LOOKUP_CHUNKS)]
    seconds = await _in_turn(
        {"kvhold": lambda: tier.probe(keys), "one round trip": tier.check}, rounds=25
    )
    rate, limit = 1 / seconds["kvhold"], 1 / seconds["one round trip"]
    return TierRow(
        name,
        f"lookup of {LOOKUP_CHUNKS} chunks",
        rate,
        limit,
        rate / limit,
        "calls/s",
        "one round trip",
    )


class Retriever:
    """Memory holds one prompt, the tier two."""

    def __init__(self, url: str) -> None:
        group = Group(layers=32, planes=2, heads=8, head_dim=128, dtype="bfloat16")
        layout = Layout(
            groups=(group,), tokens_per_chunk=VALUE_BYTES // group.layer_bytes(1) // group.layers
        )
        namespace = Namespace(model="bench", layout=layout)
        ram_bytes = int(1.2 * NUM_VALUES * VALUE_BYTES) + 8 * MIB
        self._cache = LocalCache(
            load_config(
                {"ram_bytes": ram_bytes, "tiers": [url], "write_behind_bytes": ram_bytes},
                environ={},
            )
        )
        self._cache.register(namespace)
        numbers = np.random.default_rng(0).integers(
            0, 1 << 30, (2, NUM_VALUES * layout.tokens_per_chunk), dtype=np.int32
        )
        self._prompts = [namespace.prompt(row) for row in numbers]
        self.nbytes = NUM_VALUES * layout.chunk_bytes(0, layout.tokens_per_chunk)
        for prompt in self._prompts:
            with self._cache.reserve(layout, prompt.chunks()) as reservation:
                for at in reservation.chunks().offsets:
                    reservation.buffer[at : at + VALUE_BYTES] = 7
                reservation.commit()
            assert self._cache.flush(deadline_s=120)

    def retrieve(self, *, check: bool) -> None:
        assert self._cache.tier_worker is not None
        self._cache.tier_worker.reader.check = check
        self._prompts.reverse()
        with self._cache.lookup(self._prompts[0].query(), wait_s=120) as hit:
            assert hit.num_tokens == len(self._prompts[0].tokens), hit.num_tokens

    def close(self) -> None:
        self._cache.close()


async def _checks_row(name: str, url: str) -> TierRow:
    retriever = Retriever(url)
    work = {
        "kvhold": _threaded(lambda: retriever.retrieve(check=True)),
        "no checks": _threaded(lambda: retriever.retrieve(check=False)),
    }
    seconds = await _in_turn(work, rounds=CHECK_ROUNDS)
    retriever.close()
    return _row(name, "retrieve, checked", retriever.nbytes, seconds, "no checks")


async def _in_turn(
    work: dict[str, Work], *, before: dict[str, Work] | None = None, rounds: int = 0
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(1 + (rounds or ROUNDS)):
        turns = list(work.items())
        for name, call in reversed(turns) if number % 2 else turns:
            if before and name in before:
                await before[name]()
            began = time.perf_counter()
            await call()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(times[1:]) for name, times in seconds.items()}


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value


def _threaded(work: Callable[[], None]) -> Work:
    return lambda: asyncio.to_thread(work)


def _row(tier: str, op: str, nbytes: int, seconds: dict[str, float], limit: str) -> TierRow:
    rate, most = nbytes / seconds["kvhold"] / 1e6, nbytes / seconds[limit] / 1e6
    return TierRow(tier, op, rate, most, rate / most, limit=limit)
