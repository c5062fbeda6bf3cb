"""A tier of your own: an SQLite file. A cache writes to it, and a later cache reads from it.

    python examples/plugin_tier.py

A tier keeps opaque values under keys of 40 bytes. `kvhold.testing.TierContract` tests it, see
tests/examples/test_plugin_tier.py. A tier in a package has an entry point in the group
`kvhold.tiers`; this one is loaded as `plugin://module:Class`.
"""

import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

import kvhold
from kvhold.core.errors import TierError
from kvhold.tiers.base import Parts, TierTraits, check_lengths, in_thread, size_of
from kvhold.tiers.url import TierUrl

Result = TypeVar("Result")


class SQLiteTier:
    traits: ClassVar[TierTraits] = TierTraits(name="sqlite", durable=True)

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1)  # SQLite blocks

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        return cls(url.options["file"])

    async def check(self) -> None:
        await self._run("check", lambda: self._sql("SELECT 1"))

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        sql = "SELECT length(value) FROM chunks WHERE key = ?"
        return await self._run("probe", lambda: [self._first(sql, key) for key in keys])

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        asked = zip(keys, into, starts if starts is not None else [None for _ in keys], strict=True)
        return await self._run("get", lambda: [self._read(*item) for item in asked])

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        sql = "INSERT INTO chunks VALUES (?, ?) ON CONFLICT DO NOTHING"
        await self._run("put", lambda: [self._sql(sql, k, b"".join(v)) for k, v in items])
        return [None] * len(items)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        sql = "DELETE FROM chunks WHERE key = ?"
        return await self._run("delete", lambda: [self._sql(sql, k).rowcount == 1 for k in keys])

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        rows = await self._run("scan", lambda: list(self._sql("SELECT key FROM chunks")))
        for key in (key for (key,) in rows if key.startswith(prefix)):
            yield key

    async def close(self) -> None:
        if self._file is not None:
            await in_thread(self._thread, self._file.close)
        self._file = None
        self._thread.shutdown()

    async def _run(self, operation: str, work: Callable[[], Result]) -> Result:
        def in_one_transaction() -> Result:
            if self._file is None:
                self._file = sqlite3.connect(self._path)
                self._sql("CREATE TABLE IF NOT EXISTS chunks (key BLOB PRIMARY KEY, value BLOB)")
            with self._file:
                return work()

        try:
            return await in_thread(self._thread, in_one_transaction)
        except sqlite3.Error as error:
            raise TierError("sqlite", operation, f"{self._path}: {error}") from error

    def _sql(self, sql: str, *values: object) -> sqlite3.Cursor:
        assert self._file is not None
        return self._file.execute(sql, values)

    def _first(self, sql: str, *values: object) -> Any:
        row = self._sql(sql, *values).fetchone()
        return None if row is None else row[0]

    def _read(self, key: bytes, parts: Parts, start: int | None) -> int | None:
        value = self._first("SELECT value FROM chunks WHERE key = ?", key)
        room, at = size_of(parts), start or 0
        if value is None or (len(value) > room if start is None else len(value) < at + room):
            return None
        data = memoryview(value)[at : at + room]
        for part in parts:
            step = min(part.nbytes, len(data))
            part.cast("B")[:step] = data[:step]
            data = data[step:]
        return min(room, len(value))


GROUP = kvhold.Group(layers=2, planes=2, heads=2, head_dim=64, dtype="float32")
SPACE = kvhold.Namespace("my-model", kvhold.Layout(groups=(GROUP,), tokens_per_chunk=128))


def main() -> None:
    prompt = SPACE.prompt(np.arange(256))
    with tempfile.TemporaryDirectory() as folder:
        for run in ("first", "second"):
            with open_cache_over(Path(folder) / "chunks.db") as cache:
                cache.register(SPACE)
                with cache.lookup(prompt.query()) as hit:
                    print(f"{run} cache: {hit.num_tokens} tokens, from {hit.sources}")
                with cache.reserve(SPACE.layout, prompt.chunks()) as reservation:
                    for at in reservation.chunks().offsets[reservation.granted]:
                        reservation.buffer[at : at + SPACE.layout.whole_bytes] = 7
                    reservation.commit()
                cache.flush()  # wait until the chunks are in the tier


def open_cache_over(file: Path) -> kvhold.LocalCache:
    plugin = f"{SQLiteTier.__module__}:SQLiteTier"
    return kvhold.open_cache(
        ram_bytes="64MiB",
        tiers=[f"plugin://{plugin}?file={file}&name=sqlite"],
        plugins=[plugin],
    )


if __name__ == "__main__":
    main()
