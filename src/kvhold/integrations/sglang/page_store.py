"""Pages of one pool, by SGLang's hashes.

Only a request's first lookup is a use. Errors are logged: the page is a miss or is not stored. Any
thread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TypeAlias

import numpy as np

from kvhold.core.api import Cache, Hit, Uses, leases_as_they_arrive
from kvhold.core.cleanup import on_error
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError
from kvhold.core.holdings import ABSENT, ChunkBytes, Lease
from kvhold.core.keys import Namespace
from kvhold.core.rules import request_rules
from kvhold.integrations.sglang.names import names_of, query_of
from kvhold.integrations.sglang.pools import Bytes

log = logging.getLogger(__name__)

Copy: TypeAlias = Callable[[int, Bytes, tuple[ChunkBytes, ...]], None]
Take: TypeAlias = Callable[[int, Lease], None]


class StorageTally:
    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=1000)

    def add(self, num_pages: int, page_bytes: int, started_s: float) -> None:
        if num_pages:
            self._calls.append(
                (num_pages, num_pages * page_bytes / max(time.monotonic() - started_s, 1e-9) / 1e9)
            )

    def take(self) -> list[tuple[int, float]]:
        return [self._calls.popleft() for _ in range(len(self._calls))]


class PageStore:
    def __init__(self, cache: Cache, namespace: Namespace, config: Config) -> None:
        self._rules = request_rules(None, config.rules)
        self.namespace = namespace.narrowed(tags=self._rules.tags)
        self.loaded, self.stored = StorageTally(), StorageTally()
        self._cache = cache
        self._wait_s = config.client.arrival_timeout_s
        self._groups = range(len(namespace.layout.groups))
        self._page_bytes = sum(
            namespace.layout.chunk_bytes(group, namespace.layout.tokens_per_chunk)
            for group in self._groups
        )

    def register(self) -> None:
        with _FaultsAreMisses("register"):
            self._cache.register(self.namespace)

    def count(self, keys: Sequence[str]) -> int:
        """The pages before the first missing one; they are loaded into memory."""
        return self._find(keys, self._until(), uses=self._rules.uses) or 0

    def find(self, keys: Sequence[str], *, again: bool = False) -> Hit | None:
        """Pin the pages before the first missing one, if any.

        again: another lookup of a request
        """
        if not keys or not self._rules.load:
            return None
        with _FaultsAreMisses("lookup"):
            query = query_of(self.namespace, keys)
            hit = self._cache.lookup(query, uses="none" if again else self._rules.uses, wait_s=0)
            with on_error(hit.close):
                more = hit.arriving
                hit.settle()
                if more:
                    self._cache.prefetch(query)
            if hit.num_tokens:
                return hit
            hit.close()
        return None

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are present; they are loaded into memory."""
        return self._present(keys, self._until(), uses=self._rules.uses)

    def load(self, keys: Sequence[str], scatter: Copy) -> list[bool]:
        """Which pages arrived; others may be partly written."""
        started_s, arrived = time.monotonic(), [False] * len(keys)

        def take(first: int, lease: Lease) -> None:
            first += lease.first_chunk
            places = tuple(lease.chunks(group) for group in self._groups)
            scatter(first, lease.buffer, places)
            lease.verify(self.namespace.layout)
            whole = _whole(places)
            arrived[first : first + len(whole)] = whole

        for _ in self._walk(keys, self._until(), take):
            pass
        self.loaded.add(sum(arrived), self._page_bytes, started_s)
        return arrived

    def store(
        self, keys: Sequence[str], prefix_keys: Sequence[str] | None, gather: Copy
    ) -> list[bool]:
        """Which pages are present afterwards."""
        if not self._rules.store:
            return [False] * len(keys)
        started_s, there = time.monotonic(), [False] * len(keys)
        with _FaultsAreMisses("store"):
            names = names_of(self.namespace, keys, prefix_keys)
            with self._cache.reserve(
                self.namespace.layout, names, store_options=self._rules.store_options
            ) as reservation:
                if reservation.granted:
                    places = tuple(reservation.chunks(group) for group in self._groups)
                    gather(0, reservation.buffer, places)
                    reservation.commit()
                    there = _whole(places)
        self.stored.add(sum(there), self._page_bytes, started_s)
        rest = [number for number, written in enumerate(there) if not written]
        for number, found in zip(
            rest, self._present([keys[number] for number in rest], until_s=0.0), strict=True
        ):
            there[number] = found
        return there

    def clear(self) -> None:
        with _FaultsAreMisses("clear"):
            self._cache.clear(self.namespace.digest)

    def _until(self) -> float:
        return time.monotonic() + self._wait_s

    def _present(self, keys: Sequence[str], until_s: float, *, uses: Uses = "none") -> list[bool]:
        there = [False] * len(keys)
        for first, pages in self._walk(keys, until_s, uses=uses):
            there[first : first + pages] = [True] * pages
        return there

    def _walk(
        self,
        keys: Sequence[str],
        until_s: float,
        take: Take | None = None,
        *,
        uses: Uses = "none",
    ) -> Iterator[tuple[int, int]]:
        first = 0
        while first < len(keys):
            pages = self._find(
                keys[first:],
                until_s,
                None if take is None else partial(take, first),
                uses="none" if first else uses,
            )
            if pages is None:
                return
            if pages:
                yield first, pages
            first += pages + 1

    def _find(
        self,
        keys: Sequence[str],
        until_s: float,
        take: Callable[[Lease], None] | None = None,
        *,
        uses: Uses,
    ) -> int | None:
        if not keys or not self._rules.load:
            return None
        with _FaultsAreMisses("load"):
            wait_s = max(0.0, until_s - time.monotonic())
            size = self.namespace.layout.tokens_per_chunk
            with self._cache.lookup(
                query_of(self.namespace, keys), uses=uses, wait_s=wait_s if take is None else 0
            ) as hit:
                if take is not None:
                    for lease in leases_as_they_arrive(self._cache, hit, size, until_s=until_s):
                        take(lease)
                hit.settle()
                return hit.num_tokens // size
        return None


def _whole(places: tuple[ChunkBytes, ...]) -> list[bool]:
    return [
        bool(whole)
        for whole in np.logical_and.reduce([place.offsets != ABSENT for place in places])
    ]


class _FaultsAreMisses:
    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, KVHoldError):
            log.debug("kvhold: %s: %s", self._operation, error)
        elif isinstance(error, Exception):
            log.error("kvhold: %s", self._operation, exc_info=error)
        return isinstance(error, Exception)
