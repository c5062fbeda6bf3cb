"""Copies between the engine's blocks and the node's arena, in a worker's process.

One thread loads while requests wait. Another reserves memory for stores during a pass, and reads
the blocks before the next. vLLM computes the KV of failed loads, and all KV from the first damaged
chunk on.
"""

import logging
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvhold.core.config import Config
from kvhold.core.errors import DeviceError, KVHoldError, LayoutError, NodeError
from kvhold.core.holdings import ABSENT, ChunkBytes, Lease, Reservation
from kvhold.core.keys import Namespace
from kvhold.core.tracing import OpenSpan
from kvhold.integrations.vllm.blending.worker import MakeModel, WorkerBlends
from kvhold.integrations.vllm.copy_selftest import head_splits, prove, prove_coding
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.hosts import relay_address
from kvhold.integrations.vllm.layerwise import Layerwise, blocks_of, blocks_of_chunks, log_damage
from kvhold.integrations.vllm.namespace import join
from kvhold.integrations.vllm.naming.adapters import AdapterUse
from kvhold.integrations.vllm.naming.loads import AdapterLoads
from kvhold.integrations.vllm.stats import Tally
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.storing import Reading, Reserving, settle
from kvhold.integrations.vllm.tracing import begin_load, begin_store, end_load, engine_tracer
from kvhold.memory.arena import Region, Toucher
from kvhold.memory.coding import coded_view
from kvhold.memory.copier import Copier, HostCopier, Mark, Piece
from kvhold.memory.copy import warm_up
from kvhold.memory.device import COPY_THREADS, copier_for
from kvhold.memory.host import available_bytes
from kvhold.memory.placement import place_own_threads, place_this_thread
from kvhold.memory.views import View, opaque_blocks
from kvhold.node.span import Relay

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_WARM_BYTES = 1 << 30
# for a load, in a step that computes nothing
_IDLE_WAIT_S = 0.005


@dataclass(frozen=True)
class _Loaded:
    request_id: str
    failed_blocks: list[int]


class WorkerSide:
    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        geometry: Geometry,
        *,
        rank: int = 0,
        name: str = "vllm-worker",
        num_blocks: int,
        layerwise: bool = False,
        adapters: AdapterLoads | None = None,
        copier: Copier | None = None,
        blend_model: MakeModel | None = None,
    ) -> None:
        """num_blocks: the engine's, equal for all groups
        blend_model: None: nothing is blended
        copier: None: chosen in `register` by the blocks' device
        """
        self._config = config
        self._namespace = namespace
        self._geometry = geometry
        self._rank = rank
        self._held, self._stored = geometry.held_by(rank), geometry.stored_by(rank)
        self._relay: Relay | None = None
        self._num_blocks = num_blocks
        self._adapters = adapters or AdapterLoads()
        self._copier: Copier = copier or HostCopier(config.copy_threads or COPY_THREADS)
        self._is_copier_given = copier is not None
        self._views: dict[int, list[View]] = {}
        self._tensors: list[list[torch.Tensor]] = []
        self.tally = Tally()
        self._tracer = engine_tracer(config.otel, self.tally)
        self._inside: dict[str, OpenSpan] = {}  # loads inside the pass
        self._toucher: Toucher | None = None
        self._cache = join(config, namespace, name=name)
        placed: dict[str, Any] = {
            "initializer": place_this_thread,
            "initargs": (config.client.cores,),
        }
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvhold-load", **placed)
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvhold-store", **placed)
        self._settler = self._storer  # on the host, a copy is complete after `_read`
        self._layerwise: Layerwise | None = None
        if layerwise:
            self._layer_saver = ThreadPoolExecutor(1, thread_name_prefix="kvhold-layer", **placed)
            self._layerwise = Layerwise(
                geometry.parts[0], self._copier, self._loader, self._layer_saver
            )
        self._reserved: list[Reserving] = []
        # no pass may write to these blocks yet
        self._reading: list[tuple[Reserving, Future[Reading]]] = []
        self._read_until = 0.0
        self._finished: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        self._loading = 0
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._stored_last: set[str] = set()
        self.blends = WorkerBlends(
            config.blend, geometry, self._cache, self.tally, self._loader, self._storer, blend_model
        )

    @property
    def socket(self) -> Path:
        return self._cache.path

    def relay(self) -> Relay | None:
        """None: `span.listen` is not set, or is taken.

        Raises ConfigError, LayoutError.
        """
        if not self._config.span.listen or self._relay is not None:
            return self._relay
        try:
            self._relay = Relay(
                self._config.span,
                relay_address(self._config.span.listen),
                self._cache,
                cores=self._config.client.cores,
            )
        except NodeError as error:  # with a fixed port, another worker of this host has it
            log.warning("kvhold: this worker does not relay lookups: %s", error)
        return self._relay

    def register(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Copies to the engine's blocks are proven to be exact.

        Raises LayoutError: the geometry or a copy is wrong; DeviceError.
        """
        self._choose_copier(str(next(iter(kv_caches.values())).device))
        self._views, self._tensors = {shard: [] for shard in self._held}, []
        for part in self._geometry.parts:
            tensors = [self._blocks_of(kv_caches[name]) for name in part.layer_names]
            if len(self._held) > 1 and any(
                tensor.shape[1] % len(self._held) or tensor.ndim != 4 for tensor in tensors
            ):
                raise LayoutError(
                    f"head_shards: the heads of {part.layer_names[0]} are not an axis that "
                    f"can be divided by {len(self._held)}"
                )
            self._tensors.append(tensors)
            plain = [
                opaque_blocks(part.engine_group, head_split, block_axis=0)
                for head_split in head_splits(tensors, len(self._held))
            ]
            prove(part, tensors, plain, self._copier)
            views = [coded_view(view, self._config.memory_codec) for view in plain]
            prove_coding(part, tensors, views, self._copier)
            for shard, view in zip(self._held, views, strict=True):
                self._views[shard].append(view)
        views = [view for of_shard in self._views.values() for view in of_shard]
        warm_up(views[0].device, views)
        self._warm_pages(views)
        place_own_threads(self._config.client.cores)
        self.blends.register(kv_caches, self._copier)

    def _choose_copier(self, device: str) -> None:
        if self._is_copier_given or device == "cpu":
            return
        self._copier = copier_for(device, threads=self._config.copy_threads, cache=self._cache)
        # settling waits for the device, reading must not
        self._settler = ThreadPoolExecutor(1, thread_name_prefix="kvhold-settle")
        self._copier.prepare()
        if self._layerwise is not None:
            self._layerwise.use(self._copier)

    def _blocks_of(self, tensor: "torch.Tensor") -> "torch.Tensor":
        if tensor.shape[0] == self._num_blocks:
            return tensor
        if tensor.shape[0] % self._num_blocks:
            raise LayoutError(
                f"a layer's tensor has {tensor.shape[0]} blocks; the engine has {self._num_blocks}"
            )
        return tensor.unflatten(0, (self._num_blocks, -1))

    def _warm_pages(self, views: list[View]) -> None:
        """Otherwise the first hit pays 0.7 ms per MiB for page faults."""
        try:
            self._cache.arena_buffer.size  # noqa: B018 - the first access maps it
        except KVHoldError as error:
            log.debug("kvhold: %s", error)
        if views[0].device == "cpu":
            first = {int(address): view for view in views for address in view.table[:, 0]}
            most = min(_WARM_BYTES, available_bytes() // 16) // len(first)
            regions = [
                Region(at, min(most, view.num_rows * view.block_stride)).whole_pages()
                for at, view in first.items()
            ]
            self._toucher = Toucher(regions).start()

    def begin(self, steps: Steps) -> None:
        self.end_reading()
        self._zero(steps.zeroed)
        stored = self._stored
        if steps.storers is not None:
            stored = self._held if self._rank in steps.storers else range(0)
        self._reserved = [
            Reserving(
                store,
                shard,
                self._storer.submit(self._reserve, store, shard),
                span=self._begin_store(store, shard) if self._tracer is not None else None,
            )
            for store in steps.stores
            for shard in stored
        ]
        self._stored_last.update(store.request_id for store in steps.stores if store.last)

    def _zero(self, blocks: list[list[int]]) -> None:
        if not any(blocks):
            return
        import torch

        with torch.inference_mode():
            for tensors, ids in zip(self._tensors, blocks, strict=True):
                for tensor, block in product(tensors, ids):
                    tensor[block].zero_()

    def start_loads(self, steps: Steps) -> None:
        beside = [load for load in steps.loads if not load.inside]
        mark = self._copier.mark() if beside else None
        for load in beside:
            self._loader.submit(self._load, load, mark)
        self._loading += len(beside)
        self.blends.start(steps.blends)
        if self._layerwise is not None:
            inside = [load for load in steps.loads if load.inside]
            if self._tracer is not None:
                self._inside |= {
                    load.request_id: span
                    for load in inside
                    if (span := self._begin_load(load)) is not None
                }
            self._layerwise.begin(inside, self._prepare)

    def wait_for_layer(self, layer_name: str) -> None:
        if self._layerwise is not None:
            self._layerwise.wait(layer_name)

    def save_layer(self, layer_name: str) -> None:
        """After a layer's attention."""
        if self._layerwise is None:
            return
        for one in self._reserved:
            if (
                layer_name == self._geometry.parts[0].layer_names[0]
                and one.reservation.done()
                and (reservation := one.reservation.result()) is not None
            ):
                try:
                    one.pieces[:] = self._pieces_of(one.store, one.shard, reservation)
                # an error must not fail the pass
                except Exception:
                    log.exception(
                        "kvhold: chunks of request %s are not copied inside the pass",
                        one.store.request_id,
                    )
            if (saving := self._layerwise.save(layer_name, one.pieces)) is not None:
                one.layers.append(saving)

    def store(self, *, computed: bool = True) -> None:
        """After the pass, with one deadline for all chunks.

        computed: False: the pass failed, and its stores are dropped
        """
        reserved, self._reserved = self._reserved, []
        if self._layerwise is not None:
            if not self._layerwise.saved():
                for one in reserved:
                    one.pieces.clear()
            for request_id, failed in self._layerwise.end().items():
                if (span := self._inside.pop(request_id, None)) is not None:
                    end_load(span, failed)
                self.tally.add("failed_loads" if failed else "loads", 1)
                self._failed_blocks.update(failed)
                computed = computed and not failed  # KV computed from failed blocks is wrong
        self._read_until = time.monotonic() + self._config.client.call_timeout_s
        mark = self._copier.mark() if reserved and computed else None
        self._reading = (
            [(one, self._storer.submit(self._read, one, mark)) for one in reserved]
            if computed
            else []
        )
        for one, read in self._reading:
            self._settler.submit(settle, one, read)
        if not computed:
            for one in reserved:
                self._drop(one)

    def end_reading(self) -> None:
        """Before blocks are written: submit the last pass's copies, and fence later work.

        A copy that has not begun by the deadline is dropped.
        """
        reading, self._reading = self._reading, []
        if not reading:
            return
        late = wait(
            [read for _, read in reading], timeout=max(0.0, self._read_until - time.monotonic())
        ).not_done
        for one, read in reading:
            if read in late and read.cancel():
                one.reservation.cancel()
        wait([read for read in late if not read.cancelled()])
        for one, read in reading:
            self._copier.fence(one.layer_copies() if read.cancelled() else read.result().transfers)

    def _drop(self, one: Reserving) -> None:
        if not one.reservation.cancel():
            self._settler.submit(settle, one, None)

    def _read(self, one: Reserving, mark: Mark | None) -> Reading:
        reading = Reading(one.layer_copies())
        reservation = one.reservation.result()
        if reservation is None or not self._is_of(one.store.adapter):
            return reading
        try:
            reading.pieces = one.pieces or self._pieces_of(one.store, one.shard, reservation)
            if not reading.pieces:
                return reading
            if not one.pieces:
                reading.transfers.append(self._copier.gather(reading.pieces, after=mark))
            reading.is_whole = True
            reading.nbytes = self._count_stored(one.shard, reservation)
        except DeviceError:
            reading.is_lost = True
        except KVHoldError as error:
            log.warning("kvhold: chunks were not stored: %s", error)
        except Exception:
            log.exception("kvhold: could not store chunks of request %s", one.store.request_id)
        return reading

    def take_stored(self) -> set[str]:
        stored, self._stored_last = self._stored_last, set()
        return stored

    def take_loaded(self, *, idle: bool = False) -> set[str]:
        """idle: the engine computes nothing; wait `_IDLE_WAIT_S` for a load"""
        ended = self._take_loads(idle=idle)
        ended |= self.blends.advance(idle=idle and not ended)
        self._failed_blocks.update(self.blends.take_failed_blocks())
        return ended

    def _take_loads(self, *, idle: bool) -> set[str]:
        ended: set[str] = set()
        while self._loading:
            try:
                loaded = (
                    self._finished.get(timeout=_IDLE_WAIT_S)
                    if idle and not ended
                    else self._finished.get_nowait()
                )
            except queue.Empty:
                return ended
            self._loading -= 1
            ended.add(loaded.request_id)
            if loaded.failed_blocks and len(self._geometry.parts) > 1:
                # with several groups, vLLM accepts no block numbers
                self._failed_requests.add(loaded.request_id)
            else:
                self._failed_blocks.update(loaded.failed_blocks)
        return ended

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def close(self) -> None:
        if self._toucher is not None:
            self._toucher.stop()
        self._loader.shutdown(wait=True)
        self._storer.shutdown(wait=True)
        self._settler.shutdown(wait=True)
        if self._layerwise is not None:
            self._layer_saver.shutdown(wait=True)
        self._copier.close()
        if self._relay is not None:
            self._relay.close()
        self._cache.close()
        if self._tracer is not None:
            self._tracer.close()

    def _begin_load(self, load: Load) -> OpenSpan | None:
        assert self._tracer is not None
        block_ids = [np.array(ids, dtype=np.int64) for ids in load.block_ids]
        nbytes = sum(
            self._nbytes_into(view, ids)
            for shard in self._held
            for view, ids in zip(self._views[shard], block_ids, strict=True)
        )
        return begin_load(self._tracer, load, rank=self._rank, nbytes=nbytes)

    def _begin_store(self, store: Store, shard: int) -> OpenSpan | None:
        assert self._tracer is not None
        return begin_store(self._tracer, store, rank=self._rank, shard=shard)

    def _reserve(self, store: Store, shard: int) -> Reservation | None:
        try:
            return self._cache.reserve(
                self._namespace.layout,
                store.names,
                shard,
                store_options=store.store_options,
                groups=self._groups(store),
            )
        except KVHoldError as error:
            log.debug("kvhold: reserve: %s", error)
        except Exception:
            log.exception("kvhold: reserve for request %s", store.request_id)
        return None

    def _groups(self, store: Store) -> npt.NDArray[np.bool_] | None:
        if all(min(ids, default=0) >= 0 for ids in store.block_ids):
            return None
        num_tokens = store.names.num_tokens(self._namespace.layout)
        return np.array(
            [
                _whole(part, ids, num_tokens)
                for part, ids in zip(self._geometry.parts, store.block_ids, strict=True)
            ]
        )

    def _pieces_of(self, store: Store, shard: int, reservation: Reservation) -> list[Piece]:
        pieces = []
        for number, (view, ids) in enumerate(zip(self._views[shard], store.block_ids, strict=True)):
            places = reservation.chunks(number)
            if (places.offsets != ABSENT).any():
                pieces.append(
                    Piece(view, np.array(ids, dtype=np.int64), reservation.buffer, places)
                )
        return pieces

    def _count_stored(self, shard: int, reservation: Reservation) -> int:
        nbytes = sum(
            _nbytes(view, reservation.chunks(number))
            for number, view in enumerate(self._views[shard])
        )
        self.tally.add("stored_bytes", nbytes)
        self.tally.add("stored_chunks", len(reservation.granted))
        return nbytes

    def _prepare(self, load: Load, stack: ExitStack) -> list[Piece]:
        self._check_adapter(load)
        pieces: list[Piece] = []
        for shard in self._held:
            lease = self._cache.claim(
                load.ticket_of(self._rank),
                shard,
                first_chunk=load.first_chunk,
                deadline_s=load.patience_s,
            )
            if lease is None:
                raise KVHoldError("the hit was lost before it was claimed")
            stack.enter_context(lease)
            pieces += self._pieces_into(load, shard, lease)
        return pieces

    @staticmethod
    def _nbytes_into(view: View, blocks: npt.NDArray[np.int64]) -> int:
        return int((blocks >= 0).sum()) * view.group.layers * view.group.block_bytes

    def _load(self, load: Load, mark: Mark | None) -> None:
        began_s = time.monotonic()
        span: OpenSpan | None = None
        failed, damaged = blocks_of(load), list[int]()
        leases: list[Lease] = []
        try:
            if self._tracer is not None:
                span = self._begin_load(load)
            self._check_adapter(load)
            for shard in self._held:
                lease = self._cache.claim(
                    load.ticket_of(self._rank),
                    shard,
                    first_chunk=load.first_chunk,
                    deadline_s=load.patience_s,
                )
                if lease is None:
                    break
                leases.append(lease)
                damaged += self._scatter(load, shard, lease, mark)
            else:
                failed = sorted(set(damaged))
                if failed:
                    log_damage(load, failed)
        except DeviceError:
            for lease in leases:
                lease.keep()
            leases.clear()
        except KVHoldError as error:
            log.warning(
                "kvhold: the KV of request %s did not arrive and is computed: %s",
                load.request_id,
                error,
            )
        # `failed` tells the engine what to compute
        except Exception:
            log.exception(
                "kvhold: the KV of request %s could not be copied and is computed", load.request_id
            )
        finally:
            self.tally.add("failed_loads" if failed else "loads", 1)
            self.tally.add("load_seconds", time.monotonic() - began_s)
            if span is not None:
                end_load(span, failed)
            self._finished.put(_Loaded(load.request_id, failed))
            for lease in leases:
                lease.close()

    def _is_of(self, adapter: AdapterUse | None) -> bool:
        return adapter is None or self._adapters.match(adapter)

    def _check_adapter(self, load: Load) -> None:
        if not self._is_of(load.adapter):
            raise KVHoldError(
                "vLLM has loaded its adapter from other files than those that name the KV, or "
                "has not loaded it yet"
            )

    def _scatter(self, load: Load, shard: int, lease: Lease, mark: Mark | None) -> list[int]:
        pieces = self._pieces_into(load, shard, lease)
        damage = self._copier.scatter(pieces, after=mark).wait()
        damaged: list[int] = []
        for part, piece, error in zip(self._geometry.parts, pieces, damage, strict=True):
            if error is not None:
                damaged += blocks_of_chunks(error.chunks, part, piece.ids, piece.places)
        return damaged

    def _pieces_into(self, load: Load, shard: int, lease: Lease) -> list[Piece]:
        pieces = []
        for number, (view, ids) in enumerate(zip(self._views[shard], load.block_ids, strict=True)):
            piece = Piece(view, np.array(ids, dtype=np.int64), lease.buffer, lease.chunks(number))
            _check_covered(self._geometry.parts[number], piece.ids, piece.places)
            self.tally.add("loaded_bytes", self._nbytes_into(view, piece.ids))
            pieces.append(piece)
        return pieces


def _whole(part: Part, ids: list[int], num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    counts = -(-num_tokens // part.group.block_tokens)
    ends = np.cumsum(counts)
    there = np.array(ids, dtype=np.int64) >= 0
    return np.array(
        [there[end - count : end].all() for end, count in zip(ends, counts, strict=True)]
    )


def _check_covered(part: Part, blocks: npt.NDArray[np.int64], places: ChunkBytes) -> None:
    """Raises KVHoldError: a block would get no bytes."""
    per_chunk = -(-places.num_tokens // part.group.block_tokens)
    absent = np.repeat(places.offsets == ABSENT, per_chunk)
    if (absent & (blocks >= 0)).any():
        raise KVHoldError(
            f"the hit has no KV for {int((absent & (blocks >= 0)).sum())} blocks of KV "
            f"cache group {part.table}"
        )


def _nbytes(view: View, places: ChunkBytes) -> int:
    there = places.num_tokens[places.offsets != ABSENT]
    return sum(view.group.layers * view.group.layer_bytes(int(num_tokens)) for num_tokens in there)
