"""The connector in a worker's process: copies between the engine's blocks and the node's arena.

Loads run on a thread of their own, beside the forward passes: their requests wait outside them. Stores read blocks right after the pass
that filled them, on the engine's thread, because later the blocks may be another request's; memory for them is reserved during the
pass, and committed after it, by a second thread. A failed load's blocks are reported and computed; a failed store is a later miss.
"""

import logging
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvhold.core.api import ABSENT, ChunkBytes, Loan, Room
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.kernels import Chunks, gather, plan_blocks, scatter, warm_up
from kvhold.memory.views import View, opaque_blocks
from kvhold.node import connect

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


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
        self._cache = connect(config, name="vllm-worker")
        self._cache.register(namespace)
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

    def begin(self, steps: Steps) -> None:
        """Before the pass: ask for memory for what it will complete."""
        self._reserved = [(store, self._storer.submit(self._reserve, store)) for store in steps.stores]

    def start_loads(self, steps: Steps) -> None:
        """Start the loads; they end in `take_loaded`."""
        for load in steps.loads:
            self._loader.submit(self._load, load)

    def store(self) -> None:
        """After the pass: copy what it completed, and have it committed."""
        reserved, self._reserved = self._reserved, []
        for store, future in reserved:
            try:
                room = future.result(timeout=self._config.client.call_timeout_s)
            except FutureTimeout:
                future.add_done_callback(_close_late_room)
                continue
            if room is None:
                continue
            try:
                if self._gather(store, room):
                    self._storer.submit(_commit, room)
                else:
                    self._storer.submit(room.close)
            except (KVHoldError, ValueError):
                log.exception("kvhold: could not store chunks of request %s", store.request_id)
                self._storer.submit(room.close)

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
        self._loader.shutdown(wait=True)
        self._storer.shutdown(wait=True)
        self._cache.close()

    def _reserve(self, store: Store) -> Room | None:
        try:
            return self._cache.reserve(self._namespace.layout, store.names, self._shard)
        except KVHoldError as error:
            log.debug("kvhold: reserve: %s", error)
            return None

    def _gather(self, store: Store, room: Room) -> bool:
        """Copy the granted chunks out of their blocks. False when there was none."""
        places = room.chunks()
        granted = places.offsets != ABSENT
        if not granted.any():
            return False
        assert self._view is not None
        chunks = Chunks(room.buffer, places.offsets[granted], places.num_tokens[granted])
        gather(plan_blocks(self._view, self._blocks_of(store.block_ids, places, granted), chunks), threads=self._threads)
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
        except (ValueError, AssertionError):
            log.exception("kvhold: the KV of request %s could not be copied and is computed", load.request_id)
        finally:
            self._finished.put(_Loaded(load.request_id, failed))

    def _scatter(self, load: Load, loan: Loan) -> None:
        assert self._view is not None
        places = loan.chunks()
        block_ids = np.array(load.block_ids, dtype=np.int64)
        scatter(plan_blocks(self._view, block_ids, Chunks(loan.buffer, places.offsets, places.num_tokens)), threads=self._threads)

    def _blocks_of(self, block_ids: list[int], places: ChunkBytes, granted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        per_chunk = places.num_tokens // self._namespace.layout.tail_tokens
        return np.array(block_ids, dtype=np.int64)[np.repeat(granted, per_chunk)]


def _commit(room: Room) -> None:
    """On the store thread, whose exceptions nobody would see."""
    with room:
        try:
            room.commit()
        except KVHoldError as error:
            log.warning("kvhold: chunks were not stored: %s", error)


def _close_late_room(future: "Future[Room | None]") -> None:
    if not future.cancelled() and future.exception() is None:
        room = future.result()
        if room is not None:
            room.close()
