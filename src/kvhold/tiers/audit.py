"""`audit+...`: compare a tier's values with the put ones, and log calls.

It keeps the `max_keys` digests used last (xxh3-128). Not checked: ranges, earlier values,
overlapping calls, other processes' changes.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

from xxhash import xxh3_128

from kvhold.core.errors import ConfigError, TierError
from kvhold.core.setting import apply, setting
from kvhold.tiers.base import (
    FolderMet,
    HasFolders,
    Parts,
    Tier,
    TierTraits,
    in_thread,
    replace,
    size_of,
)
from kvhold.tiers.scans import closing_scan

OPERATIONS = ("check", "probe", "get", "put", "replace", "delete", "scan")

log = logging.getLogger("kvhold.audit")

_PREFIX = "audit_"
_LARGE_BYTES = 256 << 10  # hashed in about 20 µs; more bytes are hashed in a thread


@dataclass(frozen=True)
class AuditConfig:
    max_keys: int = setting(100_000, "number of digests to keep, about 200 bytes each", minimum=1)
    exclude: str = setting(
        "", f"operations that are not logged, separated by commas: {', '.join(OPERATIONS)}"
    )


class AuditTier:
    option_names: ClassVar[frozenset[str]] = frozenset({"audit_max_keys", "audit_exclude"})

    def __init__(
        self, inner: Tier, config: AuditConfig | None = None, *, shown: str | None = None
    ) -> None:
        config = config or AuditConfig()
        self.traits: TierTraits = inner.traits
        self.checked = 0
        self.mismatches = 0
        self._inner = inner
        self._shown = shown or inner.traits.name
        self._excluded = _operations(config.exclude)
        self._digests = _Digests(config.max_keys)
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="kvhold-audit")

    @classmethod
    def from_url(cls, inner: Tier, options: Mapping[str, str], shown: str) -> Self:
        values = {name.removeprefix(_PREFIX): value for name, value in options.items()}
        config = apply(AuditConfig(), values, source=shown, spell=lambda name: _PREFIX + name)
        try:
            return cls(inner, config, shown=shown)
        except ConfigError as error:
            raise ConfigError(f"{shown}: {error}") from None

    def watch_folders(self, met: FolderMet) -> None:
        if isinstance(self._inner, HasFolders):
            self._inner.watch_folders(met)

    async def check(self) -> None:
        with self._logged("check", 0):
            await self._inner.check()

    async def probe(self, keys: Sequence[bytes]) -> Sequence[int | TierError | None]:
        with self._logged("probe", len(keys)) as line:
            found = await self._inner.probe(keys)
            line.count("found", sum(isinstance(size, int) for size in found))
        return found

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        with self._logged("get", len(keys)) as line:
            before = [self._digests.of(key) for key in keys]
            got = await self._inner.get(keys, into, starts=starts)
            if starts is None:
                got = await self._checked(keys, into, got, before)
            sizes = [item for item in got if isinstance(item, int)]
            line.num_bytes = sum(sizes)
            line.count("found", len(sizes))
            line.count("failed", sum(isinstance(item, TierError) for item in got))
        return got

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        keys = [key for key, _ in items]
        with self._logged("put", len(items)) as line, self._digests.changing(keys):
            digests = await self._hash([parts for _, parts in items])
            there = await self._inner.probe(keys)
            faults = await self._inner.put(items, ttl_s=ttl_s)
            for key, digest, size, fault in zip(keys, digests, there, faults, strict=True):
                if fault is None:
                    self._digests.stored(key, digest, was_there=size is not None)
            line.num_bytes = sum(
                size_of(parts)
                for (_, parts), fault in zip(items, faults, strict=True)
                if fault is None
            )
            line.count("failed", sum(fault is not None for fault in faults))
        return faults

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        keys = [key for key, _ in items]
        with self._logged("replace", len(items)) as line, self._digests.changing(keys):
            digests = await self._hash([parts for _, parts in items])
            done = await replace(self._inner, items)
            for (key, parts), digest, outcome in reversed(
                list(zip(items, digests, done, strict=True))
            ):
                if outcome is True:
                    self._digests.stored(key, digest, was_there=False)
                    line.num_bytes += size_of(parts)
                else:
                    self._digests.forget(key)
            line.count("failed", sum(isinstance(outcome, TierError) for outcome in done))
        return done

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        with self._logged("delete", len(keys)) as line, self._digests.changing(keys):
            for key in keys:
                self._digests.forget(key)
            removed = await self._inner.delete(keys)
            line.count("removed", sum(removed))
        return removed

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        with self._logged("scan", 0) as line:
            async with closing_scan(self._inner, prefix) as keys:
                async for key in keys:
                    line.num_keys += 1
                    yield key

    async def close(self) -> None:
        self._hasher.shutdown(wait=False)
        await self._inner.close()

    async def _checked(
        self,
        keys: Sequence[bytes],
        into: Sequence[Parts],
        got: list[int | TierError | None],
        before: Sequence[bytes | None],
    ) -> list[int | TierError | None]:
        # of changed keys, the read may have met either value
        some = [
            (i, size, digest)
            for i, digest in enumerate(before)
            if digest is not None
            and self._digests.of(keys[i]) is digest
            and isinstance(size := got[i], int)
        ]
        digests = await self._hash([_beginning(into[i], size) for i, size, _ in some])
        self.checked += len(some)
        answers = list(got)
        for (i, size, expected), digest in zip(some, digests, strict=True):
            if digest != expected:
                self.mismatches += 1
                log.error(
                    "%s: %s came back with other bytes than were put (%d bytes)",
                    self._shown,
                    keys[i].hex(),
                    size,
                )
                answers[i] = TierError(
                    f"audit+{self.traits.name}",
                    "get",
                    f"{keys[i].hex()} came back with other bytes than were put",
                )
        return answers

    async def _hash(self, values: Sequence[Parts]) -> list[bytes]:
        if sum(map(size_of, values)) <= _LARGE_BYTES:
            return [_digest(parts) for parts in values]
        return await in_thread(self._hasher, lambda: [_digest(parts) for parts in values])

    @contextmanager
    def _logged(self, operation: str, num_keys: int) -> "Iterator[_Line]":
        line = _Line(num_keys)
        began_s = time.perf_counter()
        try:
            yield line
        except (TierError, asyncio.CancelledError) as error:
            line.outcome = f", {type(error).__name__}"
            raise
        finally:
            if operation not in self._excluded:
                seconds = time.perf_counter() - began_s
                log.info(
                    "%s: %s: %d keys, %d bytes, %.6f s%s",
                    self._shown,
                    operation,
                    line.num_keys,
                    line.num_bytes,
                    seconds,
                    line.outcome,
                )


@dataclass
class _Line:
    num_keys: int
    num_bytes: int = 0
    outcome: str = ""

    def count(self, word: str, number: int) -> None:
        self.outcome += f", {number} {word}"


class _Digests:
    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._changing: dict[bytes, int] = {}
        self._disputed: set[bytes] = set()

    def of(self, key: bytes) -> bytes | None:
        if key in self._changing or key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def stored(self, key: bytes, digest: bytes, *, was_there: bool) -> None:
        if not was_there:
            self._kept[key] = digest
            self._kept.move_to_end(key)
            while len(self._kept) > self._max_keys:
                self._kept.popitem(last=False)
        elif self._kept.get(key) != digest:
            self.forget(key)

    def forget(self, key: bytes) -> None:
        self._kept.pop(key, None)

    @contextmanager
    def changing(self, keys: Sequence[bytes]) -> Iterator[None]:
        """Drop the digests of keys that several calls change; after a failure, of all `keys`."""
        for key in keys:
            self._changing[key] = self._changing.get(key, 0) + 1
            if self._changing[key] > 1:
                self._disputed.add(key)
        failed = True
        try:
            yield
            failed = False
        finally:
            for key in keys:
                if failed or key in self._disputed:
                    self.forget(key)
                self._changing[key] -= 1
                if not self._changing[key]:
                    del self._changing[key]
                    self._disputed.discard(key)


def _operations(names: str) -> frozenset[str]:
    operations = frozenset(filter(None, (name.strip() for name in names.split(","))))
    if unknown := sorted(operations - set(OPERATIONS)):
        raise ConfigError(
            f"audit_exclude: there is no operation {unknown[0]!r}; known are "
            f"{', '.join(OPERATIONS)}"
        )
    return operations


def _digest(parts: Parts) -> bytes:
    state = xxh3_128()
    for part in parts:
        state.update(part.cast("B"))
    return state.digest()


def _beginning(parts: Parts, nbytes: int) -> list[memoryview]:
    cut = []
    for part in parts:
        cut.append(part.cast("B")[:nbytes])
        nbytes -= cut[-1].nbytes
    return cut
