"""Blended loads in a worker.

The load thread copies spans out of the arena. The engine's thread computes one part of a load after
each pass, into the request's blocks. After any fault vLLM computes the request.
"""

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvhold.blend.canary import Canary, Drift, drift_of
from kvhold.blend.permits import Permits
from kvhold.blend.reports import drift_note, report
from kvhold.blend.rows import FlowingRows, PromptKV
from kvhold.blend.selection import (
    BlendPlan,
    NoSelection,
    StoredSpan,
    selector_of,
    selector_text,
)
from kvhold.core.blend_config import BlendConfig
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import ChunkNames
from kvhold.core.planning import MOST_NAME, BlendReport
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.stats import Tally
from kvhold.integrations.vllm.steps import BlendLoad, SpanLoad
from kvhold.memory.copier import Copier, Piece, wait_for
from kvhold.memory.views import opaque_blocks
from kvhold.node import NodeClient

if TYPE_CHECKING:
    from kvhold.integrations.vllm.blending.model import EngineModel

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.005


MakeModel: TypeAlias = Callable[[dict[str, torch.Tensor]], "EngineModel"]


@dataclass(frozen=True)
class _Job:
    load: BlendLoad
    kv: PromptKV | None


class WorkerBlends:
    def __init__(
        self,
        config: BlendConfig,
        geometry: Geometry,
        cache: NodeClient,
        tally: Tally,
        loader: Executor,
        storer: Executor,
        make_model: MakeModel | None,
    ) -> None:
        """loader, storer: of one thread each"""
        self.refusal = "" if make_model is not None else "blend.selector is off"
        self._selector = selector_of(config) or NoSelection()
        self._part, self._layout = geometry.parts[0], geometry.layout
        self._cache = cache
        self._tally = tally
        self._loader, self._storer = loader, storer
        self._canary = Canary.of(config, Permits.of(config))
        self._make_model = make_model
        self._model: EngineModel
        self._copier: Copier
        self._ready: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._running: tuple[BlendLoad, Iterator[None]] | None = None
        self._num_jobs = 0
        self._failed: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor], copier: Copier) -> None:
        if self._make_model is None:
            return
        try:
            self._model, self._copier = self._make_model(kv_caches), copier
            if not 0 <= self._selector.check_layer < len(self._model.layer_names):
                raise LayoutError(
                    f"blend.check_layer is {self._selector.check_layer}; the model has "
                    f"{len(self._model.layer_names)} layers"
                )
        except LayoutError as error:
            self.refusal = str(error)
            log.warning("kvhold: requests are served without blend: %s", error)

    def start(self, loads: Sequence[BlendLoad]) -> None:
        for load in loads:
            self._loader.submit(self._prepare, load)
        self._num_jobs += len(loads)

    def advance(self, *, idle: bool) -> set[str]:
        """Compute one part. Returns the requests whose loads have ended.

        idle: the engine has nothing else to compute
        """
        if self._running is None and not self._begin(idle=idle):
            return set()
        assert self._running is not None
        load, steps = self._running
        try:
            next(steps)
        except StopIteration:
            self._tally.add("loads", 1)
        except KVHoldError as error:
            log.warning("kvhold: request %s is computed without blend: %s", load.request_id, error)
            self._fail(load)
        # the engine computes what is reported as failed
        except Exception:
            log.exception("kvhold: request %s is computed without blend", load.request_id)
            self._fail(load)
        else:
            return set()
        self._running = None
        self._num_jobs -= 1
        return {load.request_id}

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _begin(self, *, idle: bool) -> bool:
        if not self._num_jobs:
            return False
        try:
            job = self._ready.get(timeout=_IDLE_WAIT_S) if idle else self._ready.get_nowait()
        except queue.Empty:
            return False
        self._running = job.load, self._compute(job)
        return True

    def _fail(self, load: BlendLoad) -> None:
        self._failed.update(load.block_ids)
        self._tally.add("failed_loads", 1)

    def _prepare(self, load: BlendLoad) -> None:
        kv = None
        try:
            if self.refusal:
                raise LayoutError(self.refusal)
            kv = self._model.empty(len(load.tokens))
            if load.num_exact:
                self._read(load, load.ticket, kv, 0, 0, load.num_exact)
            for span in load.spans:
                if span.ticket:
                    self._read(load, span.ticket, kv, span.start, span.skip, span.end - span.start)
        except KVHoldError as error:
            kv = None
            log.debug("kvhold: spans of request %s: %s", load.request_id, error)
        # reported by the engine's thread
        except Exception:
            kv = None
            log.exception("kvhold: spans of request %s", load.request_id)
        finally:
            self._ready.put(_Job(load, kv))

    def _read(
        self, load: BlendLoad, ticket: int, kv: PromptKV, first: int, skip: int, end: int
    ) -> None:
        lease = self._cache.claim(ticket, 0, first_chunk=0, deadline_s=load.patience_s)
        if lease is None:
            raise KVHoldError("the hit was lost before it was claimed")
        with lease:
            places = lease.chunks()
            if (places.offsets == ABSENT).any() or int(places.num_tokens.sum()) < end:
                raise KVHoldError("the hit lacks chunks")
            ids = _blocks(places.num_tokens, self._part.group.block_tokens)
            scratch = self._model.scratch(len(ids))
            piece = Piece(self._view(scratch), ids, lease.buffer, places)
            (damage,) = self._copier.scatter([piece], after=self._copier.mark()).wait()
            if damage is not None:
                raise damage
        self._model.read(scratch, kv, first, skip, end)

    def _compute(self, job: _Job) -> Iterator[None]:
        load, kv = job.load, job.kv
        if kv is None:
            raise KVHoldError("its spans could not be read")
        tokens = torch.from_numpy(np.array(load.tokens, dtype=np.int64))
        for span in load.spans:
            if not span.ticket:
                self._compute_alone(load, span, tokens, kv)
                yield
        stored = [
            StoredSpan(span.start + span.skip, span.end, span.skip, span.text_end)
            for span in load.spans
        ]
        # with the last token, too: selectors must see the whole question
        plan = BlendPlan(len(tokens), tuple(stored), load.num_exact)
        hidden, positions = self._model.prefill(tokens, kv, plan, self._selector)
        drift = None
        if load.permit is not None and self._canary.is_due(load.permit):
            yield
            kv, drift = self._compare(tokens, hidden)
            if reason := self._canary.record(load.permit, drift):
                log.warning("kvhold: the permit for blend is withdrawn: %s", reason)
        self._model.write(kv, load.num_tokens, load.block_ids)
        self._storer.submit(report, self._cache, self._report_of(load, len(positions), drift))

    def _compute_alone(self, load: BlendLoad, span: SpanLoad, tokens: Any, kv: PromptKV) -> None:
        """As a prompt of its own, so that no span has another text's content."""
        count = span.num_tokens
        alone = self._model.empty(count)
        text = tokens[span.start : span.start + count]
        self._model.prefill(text, alone, BlendPlan(count, ()), NoSelection())
        first, last = span.start + span.skip, span.end
        for ours, theirs in zip(kv.layers, alone.layers, strict=True):
            part = slice(span.skip, last - span.start)
            ours.keys[:, :, first:last] = theirs.keys[:, :, part]
            ours.values[:, :, first:last] = theirs.values[:, :, part]
        if span.names is not None:
            scratch = self._model.scratch(-(-count // self._part.group.block_tokens))
            self._model.write(alone, count, range(len(scratch[0])), scratch)
            self._storer.submit(self._store, load, span.names, scratch)

    def _store(self, load: BlendLoad, names: ChunkNames, scratch: Sequence[Any]) -> None:
        try:
            with self._cache.reserve(
                self._layout, names, 0, store_options=load.store_options
            ) as reservation:
                places = reservation.chunks()
                if (places.offsets == ABSENT).all():
                    return
                size = self._part.group.block_tokens
                ids = _blocks(places.num_tokens, size) + names.first_token // size
                piece = Piece(self._view(scratch), ids, reservation.buffer, places)
                wait_for([self._copier.gather([piece], after=self._copier.mark())])
                reservation.commit()
                self._tally.add("stored_chunks", len(reservation.granted))
        except KVHoldError as error:
            log.debug("kvhold: a span was not stored: %s", error)
        # an error must not end the thread's work
        except Exception:
            log.exception("kvhold: a span was not stored")

    def _view(self, scratch: Sequence[Any]) -> Any:
        return opaque_blocks(self._part.engine_group, scratch, block_axis=0)

    def _compare(self, tokens: torch.Tensor, blended: Any) -> tuple[PromptKV, Drift]:
        """A canary: return KV that is computed in full. blended: hidden states, the last token's
        at the end
        """
        full = self._model.empty(len(tokens))
        hidden = self._model.compute(tokens, FlowingRows(full, torch.arange(len(tokens))))
        return full, drift_of(*(self._model.logits(one) for one in (hidden, blended)))

    def _report_of(self, load: BlendLoad, recomputed: int, drift: Drift | None) -> BlendReport:
        exact, count = load.num_exact, len(load.tokens)
        reused = count - exact - recomputed
        if drift is not None:
            exact = reused = 0
        return BlendReport(
            load.request_id[:MOST_NAME],
            "blended" if drift is None else "canary",
            count,
            exact,
            reused,
            count - exact - reused,
            selector_text(self._selector)[:MOST_NAME],
            "" if drift is None else drift_note(drift),
            list(load.reports),
        )


def _blocks(num_tokens: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    return np.arange(int((-(-num_tokens // size)).sum()), dtype=np.int64)
