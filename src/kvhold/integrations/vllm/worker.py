"""The connector in a worker's process: copies between the engine's blocks and the node's arena.

Loads run on a thread of their own, beside the forward passes: their requests wait outside them. Stores run on a second one: memory is
reserved during the pass, and the blocks are read right after it, while the engine samples and plans. The next pass waits for that, because
in it the blocks may be another request's. A failed load's blocks are reported and computed; a failed store is a later miss. Damaged chunks
fail their own blocks alone: vLLM computes from the first of them on, and keeps what is before.
"""

import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvhold.core.api import ABSENT, ChunkBytes, Loan, Room
from kvhold.core.config import Config
from kvhold.core.errors import DamagedChunks, KVHoldError, LayoutError
from kvhold.core.keys import Namespace
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.layerwise import CopyLayer, Layerwise, LoadLayer, blocks_of, log_damage
from kvhold.integrations.vllm.naming.adapters import AdapterUse
from kvhold.integrations.vllm.naming.loads import AdapterLoads
from kvhold.integrations.vllm.proof import lots, prove
from kvhold.integrations.vllm.space import join
from kvhold.integrations.vllm.stats import Tally
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.memory.arena import Region, Toucher
from kvhold.memory.copier import Copier, HostCopier, Mark, Piece, Transfer
from kvhold.memory.copy import plan_gather, plan_scatter, warm_up
from kvhold.memory.host import available_bytes
from kvhold.memory.placement import place_own_threads, place_this_thread
from kvhold.memory.views import View, opaque_blocks

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_WARM_BYTES = 1 << 30  # of the engine's blocks, the first ones it will use
_IDLE_WAIT_S = 0.005  # for a load, in a step that computes nothing: about what vLLM would sleep and step in vain; new requests wait as long


@dataclass(frozen=True)
class _Loaded:
    """A load's end. `failed_blocks` did not get their KV."""

    request_id: str
    failed_blocks: list[int]


@dataclass(frozen=True)
class _Reserving:
    """Memory that is being asked for, for what a pass completes of one shard."""

    store: Store
    shard: int
    room: "Future[Room | None]"
    copies: list[CopyLayer] = field(default_factory=list)  # of what is copied a layer at a time, inside the pass


class WorkerSide:
    """One worker's copies."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        geometry: Geometry,
        *,
        rank: int = 0,
        num_blocks: int,
        layerwise: bool = False,
        adapters: AdapterLoads | None = None,
        copier: Copier | None = None,
    ) -> None:
        """rank: this worker's number in its engine; num_blocks: the engine's blocks, the same for all its KV cache groups.

        layerwise: load and store a layer at a time, inside the passes (`layerwise.refusal` has nothing to say)
        adapters: what vLLM has loaded in this process; None: there are no adapters
        copier: of the device that the blocks are on; None: the host's
        """
        self._config = config
        self._namespace = namespace
        self._geometry = geometry
        self._held, self._stored = geometry.held_by(rank), geometry.stored_by(rank)
        self._num_blocks = num_blocks
        self._adapters = adapters or AdapterLoads()
        self._threads = config.copy_threads or 2
        self._copier = copier or HostCopier(self._threads)
        self._views: dict[int, list[View]] = {}  # of each shard, a view a part
        self.tally = Tally()
        self._toucher: Toucher | None = None
        self._cache = join(config, namespace, name="vllm-worker")
        placed: dict[str, Any] = {"initializer": place_this_thread, "initargs": (config.client.cores,)}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvhold-load", **placed)
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvhold-store", **placed)
        self._layerwise: Layerwise | None = None
        if layerwise:
            self._layer_saver = ThreadPoolExecutor(1, thread_name_prefix="kvhold-layer", **placed)
            self._layerwise = Layerwise(geometry.parts[0], self._loader, self._layer_saver)
        self._reserved: list[_Reserving] = []
        self._reading: list[tuple[_Reserving, Future[Transfer | None]]] = []  # blocks that no pass may write to yet
        self._read_until = 0.0
        self._finished: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        self._loading = 0  # loads that were started and not taken
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._stored_last: set[str] = set()

    @property
    def socket(self) -> Path:
        """Of the node."""
        return self._cache.path

    def register(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Learn where the engine's blocks are, and prove that copies of them are exact.

        Raises LayoutError when they are not as the scheduler's side was told, or do not come back as they were.
        """
        self._views = {shard: [] for shard in self._held}
        for part in self._geometry.parts:
            tensors = [self._blocks_of(kv_caches[name]) for name in part.layer_names]
            if len(self._held) > 1 and any(tensor.shape[1] % len(self._held) or tensor.ndim != 4 for tensor in tensors):
                raise LayoutError(
                    f"head_shards: the heads of {part.layer_names[0]} are not an axis that can be divided by {len(self._held)}"
                )
            views = [opaque_blocks(part.group, lot, block_axis=0) for lot in lots(tensors, len(self._held))]
            prove(part, tensors, views, self._copier)
            for shard, view in zip(self._held, views, strict=True):
                self._views[shard].append(view)
        views = [view for of_shard in self._views.values() for view in of_shard]
        warm_up(views[0].device, views)
        self._warm_pages(views)
        place_own_threads(self._config.client.cores)  # the keeper's, the touchers' and those that copy were started by the engine's thread

    def _blocks_of(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A layer's tensor with the engine's blocks as its first axis; a kernel's smaller blocks become a second one."""
        if tensor.shape[0] == self._num_blocks:
            return tensor
        if tensor.shape[0] % self._num_blocks:
            raise LayoutError(f"a layer's tensor has {tensor.shape[0]} blocks; the engine has {self._num_blocks}")
        return tensor.unflatten(0, (self._num_blocks, -1))

    def _warm_pages(self, views: list[View]) -> None:
        """Have the arena mapped, and the engine's first blocks faulted in, before the first hit has to wait for that (0.7 ms a MiB)."""
        try:
            self._cache.arena_buffer.size  # noqa: B018 - the first use maps it
        except KVHoldError as error:
            log.debug("kvhold: %s", error)
        if views[0].device == "cpu":
            first = {int(address): view for view in views for address in view.table[:, 0]}  # groups may lie over each other
            most = min(_WARM_BYTES, available_bytes() // 16) // len(first)
            regions = [Region(at, min(most, view.num_rows * view.block_stride)).whole_pages() for at, view in first.items()]
            self._toucher = Toucher(regions).start()

    def begin(self, steps: Steps) -> None:
        """Before the pass: ask for memory for what it will complete."""
        self.end_reading()
        self._reserved = [
            _Reserving(store, shard, self._storer.submit(self._reserve, store, shard)) for store in steps.stores for shard in self._stored
        ]
        self._stored_last.update(store.request_id for store in steps.stores if store.last)  # after this pass, well or not

    def start_loads(self, steps: Steps) -> None:
        """Start the loads; they end in `take_loaded`."""
        beside = [load for load in steps.loads if not load.inside]
        mark = self._copier.mark() if beside else None
        for load in beside:
            self._loader.submit(self._load, load, mark)
        self._loading += len(beside)
        if self._layerwise is not None:
            self._layerwise.begin([load for load in steps.loads if load.inside], self._prepare)

    def wait_for_layer(self, layer_name: str) -> None:
        """In the pass, before the layer's attention: what is loaded inside it has come so far."""
        if self._layerwise is not None:
            self._layerwise.wait(layer_name)

    def save_layer(self, layer_name: str) -> None:
        """In the pass, after the layer's attention: what the pass completes is copied out of this layer, where there is memory by now."""
        if self._layerwise is None:
            return
        for one in self._reserved:
            if layer_name == self._geometry.parts[0].layer_names[0] and one.room.done() and (room := one.room.result()) is not None:
                try:
                    one.copies[:] = self._plan_gather(one.store, one.shard, room)
                except Exception:  # the pass must not fail with us
                    log.exception("kvhold: chunks of request %s are not copied inside the pass", one.store.request_id)
            self._layerwise.save(layer_name, one.copies)

    def store(self, *, computed: bool = True) -> None:
        """After the pass: copy what it completed, and have it committed. All stores of a pass share one deadline.

        computed: False when the pass failed; then its blocks hold no KV, and its stores are dropped
        """
        reserved, self._reserved = self._reserved, []
        if self._layerwise is not None:
            if not self._layerwise.saved():
                for one in reserved:
                    one.copies.clear()  # then all layers are copied now
            for failed in self._layerwise.end().values():
                self.tally.add("failed_loads" if failed else "loads", 1)
                self._failed_blocks.update(failed)
                computed = computed and not failed  # what was computed from blocks that were not loaded is not KV
        self._read_until = time.monotonic() + self._config.client.call_timeout_s
        mark = self._copier.mark() if reserved and computed else None
        self._reading = [(one, self._storer.submit(self._read, one, mark)) for one in reserved] if computed else []
        for one, read in self._reading:  # after all reading, which the next pass waits for
            self._storer.submit(_settle, one.room, read)
        if not computed:
            for one in reserved:
                self._drop(one)

    def end_reading(self) -> None:
        """Before anything is written to blocks: have the last pass's copies submitted, and the engine's later work begin after them.

        What has not begun in time (the node hangs) is dropped, what has is waited for.
        """
        reading, self._reading = self._reading, []
        if not reading:
            return
        late = wait([read for _, read in reading], timeout=max(0.0, self._read_until - time.monotonic())).not_done
        for one, read in reading:
            if read in late and read.cancel():
                one.room.cancel()
        wait([read for read in late if not read.cancelled()])
        transfers = [read.result() for _, read in reading if not read.cancelled()]
        self._copier.fence([transfer for transfer in transfers if transfer is not None])

    def _drop(self, one: _Reserving) -> None:
        """Do not ask for memory any more, or give it back."""
        if not one.room.cancel():
            self._storer.submit(_settle, one.room, None)

    def _read(self, one: _Reserving, mark: Mark | None) -> Transfer | None:
        """On the store thread, after memory was reserved there: submit the copies; None if there is nothing to commit."""
        room = one.room.result()
        if room is None or not self._is_of(one.store.adapter):
            return None
        transfer = None
        try:
            pieces = [] if one.copies else self._pieces_of(one.store, one.shard, room)
            if not one.copies and not pieces:
                return None
            transfer = self._copier.gather(pieces, after=mark)
            self._count_stored(one.shard, room)
        except Exception:  # nobody would see it
            log.exception("kvhold: could not store chunks of request %s", one.store.request_id)
        return transfer  # what was submitted is waited for, whatever came after it

    def take_stored(self) -> set[str]:
        """Requests that have ended and whose blocks are not needed any more."""
        stored, self._stored_last = self._stored_last, set()
        return stored

    def take_loaded(self, *, idle: bool = False) -> set[str]:
        """Requests whose loads have ended since the last call. Their failed blocks are in `take_failed_blocks` from now on.

        idle: the engine has nothing to compute; wait a moment for a load that is under way
        """
        ended: set[str] = set()
        while self._loading:
            try:
                loaded = self._finished.get(timeout=_IDLE_WAIT_S) if idle and not ended else self._finished.get_nowait()
            except queue.Empty:
                return ended
            self._loading -= 1
            ended.add(loaded.request_id)
            if loaded.failed_blocks and len(self._geometry.parts) > 1:
                self._failed_requests.add(loaded.request_id)  # vLLM does not take blocks' numbers where there are several groups
            else:
                self._failed_blocks.update(loaded.failed_blocks)
        return ended

    def take_failed_blocks(self) -> set[int]:
        """Blocks of ended loads that hold no KV."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests of ended loads whose blocks hold no KV, where there are several KV cache groups."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def close(self) -> None:
        """Finish what is under way, then leave the node."""
        if self._toucher is not None:
            self._toucher.stop()
        self._loader.shutdown(wait=True)
        self._storer.shutdown(wait=True)
        if self._layerwise is not None:
            self._layer_saver.shutdown(wait=True)
        self._cache.close()

    def _reserve(self, store: Store, shard: int) -> Room | None:
        try:
            return self._cache.reserve(self._namespace.layout, store.names, shard, terms=store.terms, groups=self._groups(store))
        except KVHoldError as error:
            log.debug("kvhold: reserve: %s", error)
        except Exception:  # the engine's step would raise it
            log.exception("kvhold: reserve for request %s", store.request_id)
        return None

    def _groups(self, store: Store) -> npt.NDArray[np.bool_] | None:
        """[parts, chunks]: of which chunks each part still has all its blocks; None: of all."""
        if all(min(ids, default=0) >= 0 for ids in store.block_ids):
            return None
        num_tokens = store.names.num_tokens(self._namespace.layout)
        return np.array([_whole(part, ids, num_tokens) for part, ids in zip(self._geometry.parts, store.block_ids, strict=True)])

    def _pieces_of(self, store: Store, shard: int, room: Room) -> list[Piece]:
        """The granted chunks and their blocks."""
        pieces = []
        for number, (view, ids) in enumerate(zip(self._views[shard], store.block_ids, strict=True)):
            places = room.chunks(number)
            if (places.offsets != ABSENT).any():
                pieces.append(Piece(view, np.array(ids, dtype=np.int64), room.buffer, places))
        return pieces

    def _count_stored(self, shard: int, room: Room) -> None:
        nbytes = sum(_nbytes(view, room.chunks(number)) for number, view in enumerate(self._views[shard]))
        self.tally.add("stored_bytes", nbytes)
        self.tally.add("stored_chunks", len(room.granted))

    def _plan_gather(self, store: Store, shard: int, room: Room) -> list[CopyLayer]:
        """Copies of what is granted, a layer at a time."""
        (view,), (ids,), places = self._views[shard], store.block_ids, room.chunks(0)
        return [plan_gather(view, np.array(ids, dtype=np.int64), room.buffer, places)] if (places.offsets != ABSENT).any() else []

    def _prepare(self, load: Load, stack: ExitStack) -> list[LoadLayer]:
        """On the load thread: claim a hit that is loaded inside a pass. Raises KVHoldError when it is gone."""
        self._check_adapter(load)
        copies: list[LoadLayer] = []
        part = self._geometry.parts[0]
        for shard in self._held:
            loan = self._cache.claim(load.ticket, shard, first_chunk=load.first_chunk, deadline_s=load.patience_s or None)
            if loan is None:
                raise KVHoldError("the hit is gone")
            stack.enter_context(loan)
            (view,), (ids,), places = self._views[shard], load.block_ids, loan.chunks(0)
            blocks = np.array(ids, dtype=np.int64)
            _check_covered(part, blocks, places)
            copy = plan_scatter(view, blocks, loan.buffer, places, threads=self._threads)
            copies.append(_checked(copy, part, blocks, places))
            self._count_loaded(view, blocks)
        return copies

    def _count_loaded(self, view: View, blocks: npt.NDArray[np.int64]) -> None:
        self.tally.add("loaded_bytes", int((blocks >= 0).sum()) * view.group.layers * view.group.block_bytes)

    def _load(self, load: Load, mark: Mark | None) -> None:
        """On the load thread: claim, copy, report; whatever happens, the request is reported. mark: what the copies come after."""
        began_s = time.monotonic()
        failed, damaged = blocks_of(load), list[int]()
        loans: list[Loan] = []
        try:
            self._check_adapter(load)
            for shard in self._held:
                loan = self._cache.claim(load.ticket, shard, first_chunk=load.first_chunk, deadline_s=load.patience_s or None)
                if loan is None:
                    break
                loans.append(loan)
                damaged += self._scatter(load, shard, loan, mark)
            else:
                failed = sorted(set(damaged))
                if failed:
                    log_damage(load, failed)
        except KVHoldError as error:
            log.warning("kvhold: the KV of request %s did not arrive and is computed: %s", load.request_id, error)
        except Exception:
            log.exception("kvhold: the KV of request %s could not be copied and is computed", load.request_id)
        finally:
            self.tally.add("failed_loads" if failed else "loads", 1)
            self.tally.add("load_seconds", time.monotonic() - began_s)
            self._finished.put(_Loaded(load.request_id, failed))
            for loan in loans:  # the engine need not wait for the node to hear of that
                loan.close()

    def _is_of(self, adapter: AdapterUse | None) -> bool:
        """Whether vLLM computes with the adapter as it was named."""
        return adapter is None or self._adapters.match(adapter)

    def _check_adapter(self, load: Load) -> None:
        """Raise KVHoldError where KV of this adapter must not be mixed with what vLLM computes."""
        if not self._is_of(load.adapter):
            raise KVHoldError("vLLM has loaded its adapter from other files than the KV is named by, or has not loaded it yet")

    def _scatter(self, load: Load, shard: int, loan: Loan, mark: Mark | None) -> list[int]:
        """Copy one shard's chunks into their blocks. Returns the blocks of damaged chunks; all others have their KV."""
        pieces = []
        for number, (view, ids) in enumerate(zip(self._views[shard], load.block_ids, strict=True)):
            piece = Piece(view, np.array(ids, dtype=np.int64), loan.buffer, loan.chunks(number))
            _check_covered(self._geometry.parts[number], piece.blocks, piece.places)
            pieces.append(piece)
        damage = self._copier.scatter(pieces, after=mark).wait()
        damaged: list[int] = []
        for part, piece, error in zip(self._geometry.parts, pieces, damage, strict=True):
            if error is not None:
                damaged += _blocks_of_chunks(error.chunks, part, piece.blocks, piece.places)
            self._count_loaded(piece.view, piece.blocks)
        return damaged


def _whole(part: Part, ids: list[int], num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[chunks]: whether all blocks of each chunk are there."""
    counts = -(-num_tokens // part.group.block_tokens)
    ends = np.cumsum(counts)
    there = np.array(ids, dtype=np.int64) >= 0
    return np.array([there[end - count : end].all() for end, count in zip(ends, counts, strict=True)])


def _check_covered(part: Part, blocks: npt.NDArray[np.int64], places: ChunkBytes) -> None:
    """Every block that the engine waits for must get its bytes; one that nobody writes would be wrong KV."""
    per_chunk = -(-places.num_tokens // part.group.block_tokens)
    absent = np.repeat(places.offsets == ABSENT, per_chunk)
    if (absent & (blocks >= 0)).any():
        raise KVHoldError(f"the hit has no KV for {int((absent & (blocks >= 0)).sum())} blocks of KV cache group {part.table}")


def _blocks_of_chunks(chunks: Sequence[int], part: Part, blocks: npt.NDArray[np.int64], places: ChunkBytes) -> list[int]:
    """The blocks that get the bytes of these chunks. blocks: of all chunks; -1 for one that is not written."""
    per_chunk = -(-places.num_tokens // part.group.block_tokens)
    chosen = np.repeat(np.isin(np.arange(per_chunk.size), chunks), per_chunk)
    return [int(block) for block in blocks[chosen & (blocks >= 0)]]


def _checked(copy: CopyLayer, part: Part, blocks: npt.NDArray[np.int64], places: ChunkBytes) -> LoadLayer:
    """The same copy; it returns the blocks of damaged chunks."""

    def load_layer(layer: int) -> list[int]:
        try:
            copy(layer)
        except DamagedChunks as error:
            return _blocks_of_chunks(error.chunks, part, blocks, places)
        return []

    return load_layer


def _nbytes(view: View, places: ChunkBytes) -> int:
    """Of the chunks that have a place."""
    there = places.num_tokens[places.offsets != ABSENT]
    return sum(view.group.layers * view.group.layer_bytes(int(num_tokens)) for num_tokens in there)


def _settle(reserved: "Future[Room | None]", read: "Future[Transfer | None] | None") -> None:
    """On the store thread, whose exceptions nobody would see: commit what was copied; give the rest back."""
    room = None if reserved.cancelled() else reserved.result()
    if room is None:
        return
    with room:
        try:
            transfer = None if read is None or read.cancelled() else read.result()
            if transfer is not None:
                transfer.wait()
                room.commit()
        except KVHoldError as error:
            log.warning("kvhold: chunks were not stored: %s", error)
