"""The cache in this process: the state machine under a lock, over an arena of its own.

    with open_cache(ram_bytes="2GiB") as cache: ...

For transformers, for tests, and wherever one process is all there is. The node drives the same state machine for many.
"""

import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvhold.cache.state import new_state
from kvhold.core.api import Hit, Loan, Room
from kvhold.core.config import Config, load_config
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.memory.arena import Arena, Toucher, default_arena_bytes


def open_cache(**settings: Any) -> "LocalCache":
    """A cache in this process, from settings as in `Config` (arguments, then environment, then file)."""
    return LocalCache(load_config(settings))


class LocalCache:
    """Meets `core.api.Cache`. Deadlines do not apply: nothing here waits for anybody. After `close`, every call raises KVHoldError."""

    def __init__(self, config: Config) -> None:
        self._arena = Arena.create(config.ram_bytes or default_arena_bytes(), huge_pages=config.huge_pages)
        self._toucher = Toucher(self._arena.regions).start()
        self._state = new_state(config, self._arena)
        self._lock = threading.Lock()
        self._closed = False
        self._owner = object()
        self._buffer = np.frombuffer(self._arena.buffer, dtype=np.uint8)

    @property
    def arena_buffer(self) -> npt.NDArray[np.uint8]:
        """[arena bytes]."""
        self._check_open()
        return self._buffer

    def register(self, namespace: Namespace) -> None:
        """Make the layout known."""
        with self._lock:
            self._check_open()
            self._state.register(namespace.layout)

    def lookup(self, query: Query, *, deadline_s: float | None = None) -> Hit:
        """The longest prefix that is here, pinned."""
        with self._lock:
            self._check_open()
            found = self._state.lookup(self._owner, query)
        return Hit(found.ticket, found.num_tokens, lambda: self._release(found.ticket))

    def claim(self, ticket: int, shard: int = 0, *, first_chunk: int = 0, deadline_s: float | None = None) -> Loan | None:
        """Take over one shard's part of a hit."""
        with self._lock:
            self._check_open()
            lent = self._state.claim(self._owner, ticket, shard, first_chunk)
        if lent is None:
            return None
        return Loan(_table(lent.offsets), _table(lent.num_tokens), first_chunk, self._buffer, lambda: self._release(lent.loan))

    def reserve(self, layout: Layout, names: ChunkNames, shard: int = 0, *, deadline_s: float | None = None) -> Room:
        """Memory for what is missing."""
        with self._lock:
            self._check_open()
            granted = self._state.reserve(self._owner, self._state.layout(layout.fingerprint), names, shard)
        return Room(
            _table(granted.offsets),
            names.num_tokens(layout),
            self._buffer,
            lambda chunks: self._commit(granted.room, chunks),
            lambda: self._abandon(granted.room),
        )

    def clear(self, namespace: bytes | None = None, *, deadline_s: float | None = None) -> int:
        """Forget everything, or one namespace."""
        with self._lock:
            self._check_open()
            return self._state.clear(namespace)

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Sizes, counts and counters."""
        with self._lock:
            self._check_open()
            return self._state.status() | {"arena_touched_bytes": self._toucher.touched_bytes}

    def close(self) -> None:
        """Give back everything, and the arena itself. Idempotent."""
        self._toucher.stop()
        with self._lock:
            self._closed = True
            self._state.gone(self._owner)
        self._buffer = np.empty(0, dtype=np.uint8)
        self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise KVHoldError("this cache is closed")

    def _release(self, number: int) -> None:
        with self._lock:
            self._state.release(self._owner, number)

    def _commit(self, room: int, chunks: Sequence[int]) -> None:
        with self._lock:
            self._check_open()
            self._state.commit(self._owner, room, chunks)

    def _abandon(self, room: int) -> None:
        with self._lock:
            self._state.abandon(self._owner, room)


def _table(rows: Sequence[Any]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)
