"""The connector in a worker's process: copies between the engine's blocks and the node's arena.

Loads run on a thread of their own, beside the forward passes: their requests wait outside them. Stores read blocks right after the pass
that filled them, on the engine's thread, because later the blocks may be another request's; memory for them is reserved during the
pass, and committed after it, by a second thread. A failed load's blocks are reported and computed; a failed store is a later miss.
"""

import logging
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvhold.core.api import ABSENT, Loan, Room
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.integrations.vllm.space import join
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.memory.arena import Region, Toucher
from kvhold.memory.copy import gather_blocks, scatter_blocks, warm_up
from kvhold.memory.host import available_bytes
from kvhold.memory.views import View, opaque_blocks

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_WARM_BYTES = 1 << 30  # of the engine's blocks, the first ones it will use


@dataclass(frozen=True)
class _Loaded:
    """A load's end. `failed_blocks` did not get their KV."""

    request_id: str
    failed_blocks: list[int]


class WorkerSide:
    """One worker's copies."""

    def __init__(self, config: Config, namespace: Namespace, layer_names: list[str], shard: int) -> None:
        self._config = config
        self._namespace = namespace
        self._layer_names = layer_names
        self._shard = shard
        self._threads = config.copy_threads or 2
        self._view: View | None = None
        self._toucher: Toucher | None = None
        self._cache = join(config, namespace, name="vllm-worker")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvhold-load")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvhold-store")
        self._reserved: list[tuple[Store, Future[Room | None]]] = []
        self._finished: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        self._failed_blocks: set[int] = set()

    def register(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Learn where the engine's blocks are. Raises LayoutError when they are not as the scheduler's side was told."""
        group = self._namespace.layout.groups[0]
        self._view = opaque_blocks(group, [kv_caches[name] for name in self._layer_names], block_axis=0)
        warm_up(self._view.device)
        self._warm_pages()

    def _warm_pages(self) -> None:
        """Have the arena mapped, and the engine's first blocks faulted in, before the first hit has to wait for that (0.7 ms a MiB)."""
        assert self._view is not None
        try:
            self._cache.arena_buffer.size  # noqa: B018 - the first use maps it
        except KVHoldError as error:
            log.debug("kvhold: %s", error)
        if self._view.device == "cpu":
            most = min(_WARM_BYTES, available_bytes() // 16) // len(self._view.table)
            pool = self._view.num_rows * self._view.block_stride
            regions = [Region(int(address), min(most, pool)).whole_pages() for address in self._view.table[:, 0]]
            self._toucher = Toucher(regions).start()

    def begin(self, steps: Steps) -> None:
        """Before the pass: ask for memory for what it will complete."""
        self._reserved = [(store, self._storer.submit(self._reserve, store)) for store in steps.stores]

    def start_loads(self, steps: Steps) -> None:
        """Start the loads; they end in `take_loaded`."""
        for load in steps.loads:
            self._loader.submit(self._load, load)

    def store(self, *, computed: bool = True) -> None:
        """After the pass: copy what it completed, and have it committed. All stores of a pass share one deadline.

        computed: False when the pass failed; then its blocks hold no KV, and its stores are dropped
        """
        reserved, self._reserved = self._reserved, []
        until = time.monotonic() + self._config.client.call_timeout_s
        for store, future in reserved:
            try:
                room = future.result(timeout=max(0.0, until - time.monotonic())) if computed else None
            except FutureTimeout:
                room = None
            if room is None:
                if not future.cancel():
                    self._storer.submit(_close_late_room, future)  # that thread has answered it by then
                continue
            try:
                copied = self._gather(store, room)
            except Exception:  # the engine's step must not fail with us
                log.exception("kvhold: could not store chunks of request %s", store.request_id)
                copied = False
            self._storer.submit(_commit if copied else Room.close, room)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call. Their failed blocks are in `take_failed_blocks` from now on."""
        ended: set[str] = set()
        while True:
            try:
                loaded = self._finished.get_nowait()
            except queue.Empty:
                return ended
            ended.add(loaded.request_id)
            self._failed_blocks.update(loaded.failed_blocks)

    def take_failed_blocks(self) -> set[int]:
        """Blocks of ended loads that hold no KV."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Finish what is under way, then leave the node."""
        if self._toucher is not None:
            self._toucher.stop()
        self._loader.shutdown(wait=True)
        self._storer.shutdown(wait=True)
        self._cache.close()

    def _reserve(self, store: Store) -> Room | None:
        try:
            return self._cache.reserve(self._namespace.layout, store.names, self._shard, ttl_s=store.ttl_s)
        except KVHoldError as error:
            log.debug("kvhold: reserve: %s", error)
        except Exception:  # the engine's step would raise it
            log.exception("kvhold: reserve for request %s", store.request_id)
        return None

    def _gather(self, store: Store, room: Room) -> bool:
        """Copy the granted chunks out of their blocks. False when there was none."""
        places = room.chunks()
        if not (places.offsets != ABSENT).any():
            return False
        assert self._view is not None
        gather_blocks(self._view, np.array(store.block_ids, dtype=np.int64), room.buffer, places, threads=self._threads)
        return True

    def _load(self, load: Load) -> None:
        """On the load thread: claim, copy, report; whatever happens, the request is reported."""
        failed = [block for block in load.block_ids if block >= 0]
        try:
            loan = self._cache.claim(load.ticket, self._shard, first_chunk=load.first_chunk)
            if loan is not None:
                with loan:
                    self._scatter(load, loan)
                failed = []
        except KVHoldError as error:
            log.warning("kvhold: the KV of request %s did not arrive and is computed: %s", load.request_id, error)
        except Exception:
            log.exception("kvhold: the KV of request %s could not be copied and is computed", load.request_id)
        finally:
            self._finished.put(_Loaded(load.request_id, failed))

    def _scatter(self, load: Load, loan: Loan) -> None:
        assert self._view is not None
        scatter_blocks(self._view, np.array(load.block_ids, dtype=np.int64), loan.buffer, loan.chunks(), threads=self._threads)


def _commit(room: Room) -> None:
    """On the store thread, whose exceptions nobody would see."""
    with room:
        try:
            room.commit()
        except KVHoldError as error:
            log.warning("kvhold: chunks were not stored: %s", error)


def _close_late_room(future: "Future[Room | None]") -> None:
    room = future.result()
    if room is not None:
        room.close()
