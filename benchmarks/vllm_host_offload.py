"""A peer for `kvhold bench vllm`: vLLM's own OffloadingConnector, on a CPU.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
     "kv_connector_extra_config": {"spec_name": "HostMemorySpec", "spec_module_path":
     "vllm_host_offload", "cpu_bytes_to_use": 1000000000}}

with this folder on PYTHONPATH. This spec has the scheduler's side, index and eviction of vLLM's
`CPUOffloadingSpec`, which refuses to copy on a CPU. For vLLM 0.32, whole blocks, one block a chunk.
"""

import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Rows = npt.NDArray[np.int8]  # [rows, bytes of a block in one layer]
Ids = npt.NDArray[np.int32]

_LOAD_THREADS = 2
_STORE_THREADS = 1  # a pass beside it needs all cores


class HostMemorySpec(CPUOffloadingSpec):
    """vLLM's spec for offloading, with the engine's blocks in host memory, too."""

    _worker: "HostMemoryWorker | None"

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(
                f"blocks_per_chunk = {self.blocks_per_chunk}: this spec moves one block a "
                "chunk; leave it out"
            )
        if self._worker is None:
            self._worker = HostMemoryWorker(kv_caches, self.num_chunks)
        return self._worker


class HostMemoryWorker(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._blocks: list[Rows] = [cache.tensor.numpy() for cache in kv_caches.tensors]
        # ones: every page is present
        self._chunks: list[Rows] = [
            np.ones((num_chunks, blocks.shape[1]), np.int8) for blocks in self._blocks
        ]
        self._loads = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="peer-load")
        self._stores = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="peer-store")
        self._running: dict[int, _Transfer] = {}
        self._finished: queue.SimpleQueue[int] = queue.SimpleQueue()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(
            self._stores, _STORE_THREADS, job_id, (self._blocks, src_spec), (self._chunks, dst_spec)
        )

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(
            self._loads, _LOAD_THREADS, job_id, (self._chunks, src_spec), (self._blocks, dst_spec)
        )

    def get_finished(self) -> list[TransferResult]:
        ended: list[TransferResult] = []
        while True:
            try:
                job_id = self._finished.get_nowait()
            except queue.Empty:
                return ended
            transfer = self._running.pop(job_id)
            success = all(part.exception() is None for part in transfer.parts)
            ended.append(
                TransferResult(
                    job_id, success, transfer.nbytes, time.perf_counter() - transfer.began_s
                )
            )

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if (transfer := self._running.get(job_id)) is not None:
                for part in transfer.parts:
                    part.result()

    def shutdown(self) -> None:
        self._loads.shutdown(wait=True)
        self._stores.shutdown(wait=True)

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        threads: int,
        job_id: int,
        source: tuple[list[Rows], LoadStoreSpec],
        target: tuple[list[Rows], LoadStoreSpec],
    ) -> bool:
        (source_rows, source_spec), (target_rows, target_spec) = source, target
        assert isinstance(source_spec, BlockIDsLoadStoreSpec)
        assert isinstance(target_spec, BlockIDsLoadStoreSpec)
        pieces = list(_pieces(source_spec.block_ids, target_spec.block_ids))
        nbytes = len(source_spec.block_ids) * sum(rows.shape[1] for rows in self._blocks)
        transfer = self._running[job_id] = _Transfer(nbytes, threads)
        for first in range(threads):
            part = pool.submit(
                _copy, source_rows[first::threads], target_rows[first::threads], pieces
            )
            transfer.parts.append(part)
            part.add_done_callback(
                lambda _: self._finished.put(job_id) if transfer.one_less() else None
            )
        return True


class _Transfer:
    """A job whose parts end on the copying threads."""

    def __init__(self, nbytes: int, parts: int) -> None:
        self.nbytes = nbytes
        self.began_s = time.perf_counter()
        self.parts: list[Future[None]] = []
        self._left = list(range(parts))  # list.pop is atomic: the last one gets 0

    def one_less(self) -> bool:
        return self._left.pop() == 0


def _copy(source: list[Rows], target: list[Rows], pieces: list[tuple[slice, slice]]) -> None:
    """numpy releases the GIL for each piece."""
    for from_rows, to_rows in zip(source, target, strict=True):
        for from_slice, to_slice in pieces:
            to_rows[to_slice] = from_rows[from_slice]


def _pieces(source: Ids, target: Ids) -> Iterator[tuple[slice, slice]]:
    if not len(source):
        return
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(source)], strict=True):
        count = last - first
        at, to = int(source[first]), int(target[first])
        yield slice(at, at + count), slice(to, to + count)
