"""Compares idle chunks in memory with their checksums, in a thread."""

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Self

from xxhash import xxh3_64_intdigest

from kvhold.cache.state import CacheState
from kvhold.core.checksums import unpack
from kvhold.core.status import ScrubStatus
from kvhold.tiers.ram import Entry

_BATCH_BYTES = 16 << 20  # about 2 ms of hashing
_MOST_BYTES_S = 1 << 30  # speed limit, even for a short interval
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 60.0


class Scrubber:
    def __init__(
        self, state: CacheState, post: Callable[[Callable[[], None]], None], interval_s: float
    ) -> None:
        """post: runs a call under the state's lock or in its loop"""
        self._state = state
        self._post = post
        self.interval_s = interval_s
        self._parts: Iterator[list[Entry]] = iter(())
        self._waiting: list[Entry] = []
        self._taken: SimpleQueue[list[Entry] | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._passes = 0
        self._pass_bytes = 0

    def start(self) -> Self:
        if self.interval_s:
            self._thread = threading.Thread(target=self._run, name="kvhold-scrub", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._taken.put(None)
        if self._thread is not None:
            self._thread.join()

    def status(self) -> ScrubStatus:
        return {
            "interval_s": self.interval_s,
            "passes": self._passes,
            "pass_bytes": self._pass_bytes,
        }

    def step(self) -> int | None:
        """None: a pass's end, or stopped."""
        self._post(lambda: self._taken.put(self.take()))
        entries = self._taken.get()
        if entries is None:
            return None
        damaged = [entry for entry in entries if not all(self.compare(entry))]
        self._post(lambda: self.give_back(entries, damaged))
        return sum(entry.nbytes for entry in entries)

    def pause_s(self, nbytes: int | None) -> float:
        """None: before the first step."""
        if nbytes is None:
            return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, self.interval_s / 100))
        return max(
            nbytes / _MOST_BYTES_S, self.interval_s * nbytes / max(1, self._state.ram.used_bytes)
        )

    def take(self) -> list[Entry] | None:
        """Pin some chunks; called through `post`. None: a pass's end."""
        if not self._waiting:
            part = next(self._parts, None)
            if part is None:
                self._passes += self._pass_bytes > 0
                self._pass_bytes = 0
                self._parts = self._state.ram.parts()
                return None
            self._waiting = part
        entries: list[Entry] = []
        nbytes = 0
        while self._waiting and nbytes < _BATCH_BYTES:
            entry = self._waiting.pop()
            if entry.checksums and not entry.pins and self._state.ram.find(entry.key) is entry:
                entries.append(entry)
                nbytes += entry.nbytes
        self._pass_bytes += nbytes
        self._state.ram.hold_all(entries)
        return entries

    def compare(self, entry: Entry) -> Iterator[bool]:
        view, checksums = self._state.ram.view(entry), unpack(entry.checksums)
        size = len(view) // len(checksums)
        for layer, stated in enumerate(checksums):
            yield xxh3_64_intdigest(view[layer * size : (layer + 1) * size]) == stated

    def give_back(self, entries: Sequence[Entry], damaged: Sequence[Entry]) -> None:
        self._state.metrics.add("kvhold_scrubbed_chunks", len(entries))
        self._state.metrics.add("kvhold_scrubbed_bytes", sum(entry.nbytes for entry in entries))
        self._state.remove_damaged(damaged, "scrubber")
        self._state.ram.unpin_all(entries)

    def _run(self) -> None:
        wait_s = self.pause_s(None)
        while not self._stopped.wait(wait_s):
            wait_s = self.pause_s(self.step())
