"""Check the blocks that KVHoldConnector loads.

vLLM's calls show which blocks a pass computes and a load fills. A loaded block's digest must be
among those of blocks computed for the same adapter, images and tokens, in this engine or an earlier
one of the `witness_folder`. On the engine's thread.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import MambaSpec

from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold_lab.verify.notes import FOLDER, Notes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

_NO_BLOCK = 0
_BLENDED = "blended"


@dataclass(frozen=True)
class WitnessHeld:
    request_id: str
    group: int
    block_ids: list[int]
    contents: list[bytes]


@dataclass
class Watched(KVConnectorMetadata):  # type: ignore[misc]  # as the engine dictates
    """in_pass: requests whose loads end in this pass
    in_part: requests that also load part of a block
    mixed: requests that got blended blocks, though they are exact
    """

    inner: KVConnectorMetadata
    computed: list[WitnessHeld] = field(default_factory=list)
    loading: list[WitnessHeld] = field(default_factory=list)
    in_pass: set[str] = field(default_factory=set)
    in_part: set[str] = field(default_factory=set)
    mixed: list[str] = field(default_factory=list)


class WitnessedConnector(KVHoldConnector):
    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        with _without_folder(vllm_config) as folder:
            super().__init__(vllm_config, role, kv_cache_config)
        self._watcher: _Watcher | None = None
        self._reader: _Reader | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._watcher = _Watcher(kv_cache_config.kv_cache_groups, self._is_blended)
        if role == KVConnectorRole.WORKER:
            self._reader = _Reader(
                kv_cache_config, Notes(folder, worker=vllm_config.parallel_config.rank)
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        with _without_folder(vllm_config):
            return super().get_required_kvcache_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        settings = {name: value for name, value in extra_config.items() if name != FOLDER}
        return super().requires_piecewise_for_cudagraph(settings)

    @property
    def _watching(self) -> "_Watcher":
        assert self._watcher is not None
        return self._watcher

    def _is_blended(self, request_id: str) -> bool:
        state = self.scheduler._request_states.get(request_id)
        return state is not None and state.is_private

    def on_new_request(self, request: "Request") -> None:
        self._watching.requests[request.request_id] = _Followed(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._watching.matched(request.request_id, num_computed_tokens, is_async=is_async)
        return num_tokens, is_async

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._watching.load(request.request_id, blocks.get_block_ids(), num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._watching.step(scheduler_output, super().build_connector_meta(scheduler_output))

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._watching.forget(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._watching.forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    @property
    def _reading(self) -> "_Reader":
        assert self._reader is not None
        return self._reader

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._reading.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, Watched)
        self._reading.begin(connector_metadata)
        super().bind_connector_metadata(connector_metadata.inner)

    def wait_for_save(self) -> None:
        self._reading.computed()
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        self._reading.ended |= results.finished_recving
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = super().get_block_ids_with_load_errors()
        self._reading.loaded(failed)
        return failed

    def shutdown(self) -> None:
        super().shutdown()
        if self._reader is not None:
            self._reader.notes.close()


@contextmanager
def _without_folder(vllm_config: "VllmConfig") -> Iterator[Path]:
    transfer = vllm_config.kv_transfer_config
    settings = transfer.kv_connector_extra_config
    transfer.kv_connector_extra_config = {
        name: value for name, value in settings.items() if name != FOLDER
    }
    try:
        yield Path(settings[FOLDER])
    finally:
        transfer.kv_connector_extra_config = settings


@dataclass
class _Followed:
    """found_at: computed tokens at the last lookup
    num_read: by group, blocks read or computed by other requests
    hashes:   by block size, of the expected contents
    """

    request: "Request"
    found_at: int = 0
    is_async: bool = True
    num_read: dict[int, int] = field(default_factory=dict)
    hashes: dict[int, list[bytes]] = field(default_factory=dict)


class UnsaltedConnector(WitnessedConnector):
    """Blended requests get no salt of their own: a fault that must be found."""

    def on_new_request(self, request: "Request") -> None:
        from kvhold.integrations.vllm.blending import requests

        vars(requests)["make_private"] = lambda request: ""
        super().on_new_request(request)


class _Watcher:
    """Blended requests are not compared. Their blocks may not be those that vLLM finds for others.

    blended: blocks that they had last
    begun:   of this pass's exact requests: tables, the first token that is written, whether the
             blocks before it may be others'
    """

    def __init__(self, groups: "list[KVCacheGroupSpec]", is_blended: Callable[[str], bool]) -> None:
        self.requests: dict[str, _Followed] = {}
        self._is_blended = is_blended
        self._blended: set[int] = set()
        self._begun: list[tuple[str, tuple[list[int], ...], int, bool]] = []
        self._specs = [_one_of(group.kv_cache_spec) for group in groups]
        self._loading: list[WitnessHeld] = []
        self._in_pass: set[str] = set()
        self._in_part: set[str] = set()

    def matched(self, request_id: str, found_at: int, *, is_async: bool) -> None:
        followed = self.requests[request_id]
        followed.found_at, followed.is_async = found_at, is_async

    def load(self, request_id: str, tables: tuple[list[int], ...], num_tokens: int) -> None:
        if self._is_blended(request_id):
            self._blended.update(block for table in tables for block in table)
            return
        followed = self.requests[request_id]
        end = followed.found_at + num_tokens
        self._begun.append((request_id, tables, followed.found_at, True))
        for group, (table, spec) in enumerate(zip(tables, self._specs, strict=True)):
            size = spec.block_size
            needed = range(max(followed.found_at, _first_needed(spec, end)) // size, end // size)
            self._loading += self._held(followed, group, table, needed)
            if end % size:
                self._in_part.add(request_id)
        if not followed.is_async:
            self._in_pass.add(request_id)

    def step(self, output: "SchedulerOutput", inner: KVConnectorMetadata) -> Watched:
        computed: list[WitnessHeld] = []
        for request_id, start, end, is_first in _spans(output):
            followed = self.requests.get(request_id)
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            if followed is None or tables is None:
                continue
            if self._is_blended(request_id):
                self._blended.update(block for table in tables for block in table)
                continue
            self._begun.append((request_id, tables, start, is_first))
            known = min(end, followed.request.num_tokens)
            for group, (table, spec) in enumerate(zip(tables, self._specs, strict=True)):
                first = start // spec.block_size if is_first else followed.num_read[group]
                whole = known // spec.block_size
                followed.num_read[group] = max(first, whole)
                if isinstance(spec, MambaSpec):  # a state exists only where a pass ends
                    first = max(
                        first, whole - 1 if known == end and known % spec.block_size == 0 else whole
                    )
                computed += self._held(followed, group, table, range(first, whole))
        mixed = self._find_mixed()
        watched = Watched(inner, computed, self._loading, self._in_pass, self._in_part, mixed)
        self._loading, self._in_pass, self._in_part = [], set(), set()
        return watched

    def _find_mixed(self) -> list[str]:
        """A request may find a block that another one writes in the same pass."""
        found, written = list[tuple[str, list[int]]](), set[int]()
        for request_id, tables, start, finds in self._begun:
            for table, spec in zip(tables, self._specs, strict=True):
                first = start // spec.block_size
                written.update(table[first:])
                if finds:
                    found.append((request_id, table[:first]))
        self._begun = []
        self._blended -= written
        return [one for one, blocks in found if self._blended.intersection(blocks)]

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def _held(
        self, followed: _Followed, group: int, table: list[int], numbers: Iterable[int]
    ) -> Iterator[WitnessHeld]:
        there = [number for number in numbers if number < len(table) and table[number] != _NO_BLOCK]
        if there:
            hashes = _prefix_hashes(followed, self._specs[group].block_size, max(there) + 1)
            request_id = followed.request.request_id
            yield WitnessHeld(
                request_id,
                group,
                [table[number] for number in there],
                [hashes[number] for number in there],
            )


def _one_of(spec: Any) -> Any:
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


def _first_needed(spec: Any, end: int) -> int:
    if isinstance(spec, MambaSpec):
        return end - int(spec.block_size)
    if window := getattr(spec, "sliding_window", None):
        return max(0, end - int(window) + 1)
    if chunk := getattr(spec, "attention_chunk_size", None):
        return end - end % int(chunk)
    return 0


def _spans(output: "SchedulerOutput") -> Iterator[tuple[str, int, int, bool]]:
    for new in output.scheduled_new_reqs:
        start = new.num_computed_tokens
        yield new.req_id, start, start + output.num_scheduled_tokens[new.req_id], True
    cached = output.scheduled_cached_reqs
    for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield (
            request_id,
            start,
            start + output.num_scheduled_tokens[request_id],
            request_id in cached.resumed_req_ids,
        )


def _prefix_hashes(followed: _Followed, block_size: int, count: int) -> list[bytes]:
    """A block's hash covers everything that its KV depends on."""
    request = followed.request
    hashes = followed.hashes.setdefault(block_size, [])
    if len(hashes) < count:
        tokens = np.array(request.all_token_ids[: count * block_size], dtype=np.int64)
        lora = request.lora_request.lora_path if request.lora_request is not None else ""
        for number in range(len(hashes), count):
            end = (number + 1) * block_size
            images = [
                (f.identifier, f.mm_position.offset)
                for f in request.mm_features or ()
                if f.mm_position.offset < end
            ]
            about = json.dumps([lora, images, block_size]).encode()
            hashes.append(
                blake2b(
                    tokens[:end].tobytes(),
                    key=blake2b(about, digest_size=32).digest(),
                    digest_size=24,
                ).digest()
            )
    return hashes[:count]


class _Reader:
    def __init__(self, kv_cache_config: "KVCacheConfig", notes: Notes) -> None:
        self.kv_caches: dict[str, Any] = {}
        self.ended: set[str] = set()
        self._num_blocks = kv_cache_config.num_blocks
        self._layers = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self.notes = notes
        self._computed: list[WitnessHeld] = []
        self._loading: dict[str, list[WitnessHeld]] = {}
        self._in_part: set[str] = set()

    def begin(self, watched: Watched) -> None:
        self._computed = watched.computed
        for held in watched.loading:
            self._loading.setdefault(held.request_id, []).append(held)
        self.ended |= watched.in_pass
        self._in_part |= watched.in_part
        for request_id in watched.mixed:
            self.notes.verdict(
                request=request_id, group=0, compared=0, wrong=[_BLENDED], unknown=[], in_part=False
            )

    def computed(self) -> None:
        """Call this before another request can use the blocks."""
        for held in self._computed:
            for block, content in zip(held.block_ids, held.contents, strict=True):
                self.notes.computed(held.group, content, self._digest(held.group, block))
        self._computed = []

    def loaded(self, failed: set[int]) -> None:
        for request_id in self.ended:
            for held in self._loading.pop(request_id, []):
                there = [
                    (b, c)
                    for b, c in zip(held.block_ids, held.contents, strict=True)
                    if b not in failed
                ]
                wrong = [
                    c.hex()
                    for b, c in there
                    if not self.notes.is_computed(held.group, c, self._digest(held.group, b))
                ]
                unknown = [c.hex() for _, c in there if not self.notes.knows(held.group, c)]
                self.notes.verdict(
                    request=request_id,
                    group=held.group,
                    compared=len(there) - len(unknown),
                    wrong=sorted(set(wrong) - set(unknown)),
                    unknown=unknown,
                    in_part=request_id in self._in_part,
                )
            self._in_part.discard(request_id)
        self.ended = set()

    def _digest(self, group: int, block: int) -> bytes:
        digest = blake2b(digest_size=16)
        for name in self._layers[group]:
            for tensor in _as_list(self.kv_caches[name]):
                digest.update(_bytes_of(tensor, block, self._num_blocks))
        return digest.digest()


def _as_list(tensors: Any) -> "list[torch.Tensor]":
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _bytes_of(tensor: "torch.Tensor", block: int, num_blocks: int) -> bytes:
    import torch

    axes = [
        axis
        for axis, size in enumerate(tensor.shape)
        if size >= num_blocks and size % num_blocks == 0
    ]
    assert axes, f"no axis of {tuple(tensor.shape)} counts {num_blocks} blocks"
    axis = max(axes, key=lambda axis: tensor.stride(axis))
    rows = tensor.shape[axis] // num_blocks
    part = tensor.narrow(axis, block * rows, rows).detach().cpu().contiguous()
    data: bytes = part.view(torch.uint8).numpy().tobytes()
    return data
