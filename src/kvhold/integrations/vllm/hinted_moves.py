"""Carry out the hints `fetch` and `share`, whose outcome is known later (docs/hints.md)."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Lock
from typing import NamedTuple

from msgspec.structs import replace

from kvhold.core.api import Hit
from kvhold.core.errors import KVHoldError
from kvhold.core.hints import Hint, HintAnswer, HintOutcome
from kvhold.core.keys import Query
from kvhold.node import NodeClient

log = logging.getLogger(__name__)

MOST_MOVES = 16
TOO_MANY = f"{MOST_MOVES} fetches and shares of this engine are running"
NOWHERE = "the node has no shared tier that it writes to, and serves no peers (peers.listen)"

_THREADS = 4
_LONGEST_S = 30.0  # of one move
_STORED_WITHIN_S = 10.0  # after the request
_PAUSE_S, _POLL_S = 0.1, 0.005
_STATUS_AGE_S = 5.0


class _Places(NamedTuple):
    """shared: read by others, and written here"""

    tiers: Sequence[str] = ()
    shared: Sequence[str] = ()
    serves_peers: bool = False


class HintedMoves:
    """reserve, and what it is followed by, run on any thread; others on the lookup thread.

    Each move has a place of `MOST_MOVES`, and holds its prompt's chunks.
    """

    def __init__(self, cache: NodeClient) -> None:
        self._cache = cache
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvhold-hints")
        self._closing = Event()
        self._lock = Lock()
        self._num_moves = 0
        self._places = _Places()
        self._places_due_s = 0.0

    def close(self) -> None:
        """End the moves early."""
        self._closing.set()
        self._threads.shutdown(wait=True)

    def reserve(self) -> bool:
        """Take a place. False: there is none."""
        with self._lock:
            if self._num_moves >= MOST_MOVES:
                return False
            self._num_moves += 1
            return True

    def fetch(self, hint: Hint, query: Query, whole: int) -> "Future[HintAnswer]":
        """Begin to load. whole: the prompt's tokens that can be stored. A place is reserved."""
        hit = self._look_up(replace(query, tier=hint.tier))
        return self._begin(lambda: self._fetch(hint, hit, whole))

    def share(self, hint: Hint, query: Query, whole: int) -> "Future[HintAnswer]":
        """Begin to write what is found to the shared tiers. A place is reserved."""
        hit = self._look_up(query)
        return self._begin(lambda: self._share(hint, hit, query, whole))

    def share_stored(self, hint: Hint, query: Query, whole: int) -> None:
        """The same when the request's chunks are in memory. A place is reserved."""
        self._begin(lambda: self._share_stored(hint, query, whole))

    def can_share(self) -> bool:
        places = self._node_places()
        return bool(places.shared) or places.serves_peers

    def has_tier(self, name: str) -> bool:
        return name in self._node_places().tiers

    def _look_up(self, query: Query) -> Hit:
        try:
            return self._cache.lookup(query, uses="none", wait_s=0)
        except BaseException:
            self._release()
            raise

    def _begin(self, work: Callable[[], HintAnswer]) -> "Future[HintAnswer]":
        def run() -> HintAnswer:
            try:
                return work()
            finally:
                self._release()

        return self._threads.submit(run)

    def _release(self) -> None:
        with self._lock:
            self._num_moves -= 1

    def _fetch(self, hint: Hint, hit: Hit, whole: int) -> HintAnswer:
        try:
            with hit:
                self._wait(hit)
        except KVHoldError as error:
            return self._failed(hint, error)
        if not hit.num_tokens:
            return hint.answer(HintOutcome.MISSING, "none of it is in memory or in a tier")
        if hit.num_tokens < whole:
            return hint.answer(
                HintOutcome.CLIPPED, f"the rest is not found: {hit.reason}", hit.num_tokens
            ).of(hit.sources)
        return hint.answer(HintOutcome.ACCEPTED, "", hit.num_tokens).of(hit.sources)

    def _share(self, hint: Hint, hit: Hit, query: Query, whole: int) -> HintAnswer:
        try:
            with hit:
                self._wait(hit)
                if not hit.num_tokens:
                    return hint.answer(HintOutcome.MISSING, "none of it is in memory or in a tier")
                return self._write(hint, query, hit.num_tokens, whole)
        except KVHoldError as error:
            return self._failed(hint, error)

    def _share_stored(self, hint: Hint, query: Query, whole: int) -> HintAnswer:
        until_s = time.monotonic() + _STORED_WITHIN_S
        while True:
            try:
                hit = self._cache.lookup(query, uses="none", wait_s=0)
            except KVHoldError as error:
                return self._failed(hint, error)
            if hit.num_tokens >= whole or time.monotonic() >= until_s or self._closing.is_set():
                answer = self._share(hint, hit, query, whole)
                if answer.outcome is not HintOutcome.ACCEPTED:
                    log.info("kvhold: a deferred share was %s: %s", answer.outcome, answer.reason)
                return answer
            hit.close()
            self._closing.wait(_PAUSE_S)

    def _write(self, hint: Hint, query: Query, num_tokens: int, whole: int) -> HintAnswer:
        places = self._node_places()
        until_s = time.monotonic() + _LONGEST_S
        faults, num_places = [], int(places.serves_peers)
        for tier in places.shared:
            with self._cache.copy(tier, query) as copying:
                progress = copying.refresh()
                while not progress.done and time.monotonic() < until_s:
                    if self._closing.is_set():
                        break
                    progress = copying.wait(min(until_s, time.monotonic() + _PAUSE_S))
            if progress.done and not progress.stopped and not progress.failed:
                num_places += 1
            elif not progress.done:
                faults.append(f"tier {tier} has not taken it in {_LONGEST_S:g} s")
            else:
                faults.append(f"tier {tier} did not take all: {progress.stopped or 'full or away'}")
        if not num_places:
            return hint.answer(HintOutcome.REJECTED, "; ".join(faults) or NOWHERE)
        if num_tokens < whole:
            faults.append(f"only the first {num_tokens} tokens are found")
        outcome = HintOutcome.CLIPPED if faults else HintOutcome.ACCEPTED
        return hint.answer(outcome, "; ".join(faults), num_tokens)

    def _wait(self, hit: Hit) -> None:
        until_s = time.monotonic() + _LONGEST_S
        while hit.arriving and time.monotonic() < until_s and not self._closing.is_set():
            self._closing.wait(_POLL_S)
            hit.refresh()
        hit.settle()

    def _node_places(self) -> _Places:
        if (now_s := time.monotonic()) >= self._places_due_s:
            status = self._cache.status()
            tiers = status.get("tiers", [])
            self._places = _Places(
                [tier["name"] for tier in tiers],
                [tier["name"] for tier in tiers if tier["shared"] and not tier["read_only"]],
                "served_peers" in status,
            )
            self._places_due_s = now_s + _STATUS_AGE_S
        return self._places

    def _failed(self, hint: Hint, error: KVHoldError) -> HintAnswer:
        log.debug("kvhold: hint %s: %s", hint.field, error)
        return hint.answer(HintOutcome.REJECTED, "the node did not carry it out")
