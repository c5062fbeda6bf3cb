"""The class that vLLM loads. No call may raise into the engine's step."""

import logging
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvhold.blend.selection import selector_of
from kvhold.core.config import Config, load_config
from kvhold.core.errors import LayoutError
from kvhold.integrations.versions import warn_if_untested
from kvhold.integrations.vllm.blending.refusals import blend_refusal
from kvhold.integrations.vllm.blending.worker import MakeModel
from kvhold.integrations.vllm.drafts import draft_limit
from kvhold.integrations.vllm.events import make_describer, publishes, with_events
from kvhold.integrations.vllm.geometry import (
    Geometry,
    geometry_of,
    mixes_adapters,
    preferred_layout,
)
from kvhold.integrations.vllm.handovers import engine_fields
from kvhold.integrations.vllm.hosts import NodePlace, place_of
from kvhold.integrations.vllm.layerwise import refusal
from kvhold.integrations.vllm.media import Media
from kvhold.integrations.vllm.namespace import host_facts, layout_only, namespace_of
from kvhold.integrations.vllm.naming.loads import observed_loads
from kvhold.integrations.vllm.scheduler import SchedulerSide
from kvhold.integrations.vllm.shown import backends_not_shown, judge, not_shown
from kvhold.integrations.vllm.stats import PromMetrics, Stats
from kvhold.integrations.vllm.steps import Steps
from kvhold.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class KVHoldConnector(KVConnectorBase_V1, SupportsHMA):
    """The settings are in `kv_connector_extra_config`."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Raises LayoutError: an unsupported set-up; ConfigError, NodeError."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        warn_if_untested("vLLM", vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        # vLLM's default fails the request
        transfer.kv_load_failure_policy = "recompute"
        settings = with_events(load_config(transfer.kv_connector_extra_config), vllm_config)
        geometry = geometry_of(vllm_config, kv_cache_config, settings)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        unshown = not_shown(vllm_config, specs, settings)
        judge(unshown, settings)
        if settings.layerwise and (reason := refusal(vllm_config, geometry)):
            raise LayoutError(
                "layerwise: kvhold does not load inside this engine's passes, because a "
                f"failed load could not be undone: {reason}"
            )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                settings,
                namespace_of(vllm_config, kv_cache_config, geometry, settings),
                geometry,
                loads=transfer.is_kv_consumer,
                stores=transfer.is_kv_producer,
                stores_plain=not mixes_adapters(vllm_config),
                make_describer=partial(make_describer, vllm_config, kv_cache_config, geometry),
                announces=publishes(vllm_config),
                layerwise=settings.layerwise,
                step_tokens=_step_tokens(vllm_config),
                media=_media_of(vllm_config),
                draft_limit=draft_limit(vllm_config),
                num_hosts=vllm_config.parallel_config.nnodes_within_dp,
            )
            if self._scheduler.blends.is_on and (
                reason := blend_refusal(vllm_config, geometry, settings)
            ):
                self._scheduler.blends.refuse(reason)
        else:
            self._settings, self._layout = settings, geometry.layout.fingerprint
            self._zeroes_first = bool(getattr(vllm_config, "use_v2_model_runner", False))
            rank, num_blocks = vllm_config.parallel_config.rank, kv_cache_config.num_blocks
            self._worker = WorkerSide(
                settings,
                layout_only(geometry),
                geometry,
                rank=rank,
                name="vllm-worker, unproven" if unshown else "vllm-worker",
                num_blocks=num_blocks,
                layerwise=settings.layerwise,
                adapters=observed_loads() if vllm_config.lora_config is not None else None,
                blend_model=_blend_model(vllm_config, kv_cache_config, geometry, settings),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store only costs a later miss."""
        return False

    # The scheduler's process.

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: "Request") -> None:
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self.scheduler.loaded(connector_output.finished_recving or ())
        self.scheduler.stored(connector_output.finished_sending or ())

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        keeps_blocks, handed = self.scheduler.finished(request, block_ids)
        params = handed | engine_fields(self._vllm_config) if handed else {}
        params |= self.scheduler.hints.finished(request)
        return keeps_blocks, params or None

    def take_events(self) -> Iterable["KVCacheEvent"]:
        self.scheduler.step_over()
        return self.scheduler.take_events()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        transfer = vllm_config.kv_transfer_config
        return (
            None
            if transfer is None
            else preferred_layout(load_config(transfer.kv_connector_extra_config))
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """One graph of a whole pass could not wait for a layer."""
        return load_config(extra_config).layerwise

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Raises LayoutError: the workers are on several hosts, and one cannot be served."""
        places = {rank: place for rank, place in metadata.items() if isinstance(place, NodePlace)}
        self.scheduler.use_hosts(places)
        for place in places.values():
            self.scheduler.blends.refuse(place.blend)

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

    # A worker's process.

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        judge(backends_not_shown(self._vllm_config), self._settings)
        self.worker.register(kv_caches)
        if has_kv_transfer_group() and get_kv_transfer_group() is not self:
            self.worker.blends.refusal = "another connector may store its KV (MultiConnector)"

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        place = replace(place_of(self.worker.socket), blend=self.worker.blends.refusal)
        relay = self.worker.relay()
        if relay is None:
            return place
        return replace(
            place,
            layout=self._layout,
            facts=host_facts(self._vllm_config, self._settings),
            relay=relay.address,
            token=relay.token,
            uses_tls=relay.uses_tls,
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin(self._steps())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first model runner calls this before it zeroes or copies blocks."""
        self.worker.end_reading()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self.worker.start_loads(self._steps())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """The first model runner calls this after a failed pass, too."""
        self.worker.store(computed=sys.exception() is None)
        if self._zeroes_first:
            self.worker.end_reading()

    def get_finished(
        self, finished_req_ids: Iterable[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        return self.worker.take_stored(), self.worker.take_loaded()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded, stored = (
            self.worker.take_loaded(idle=not self._steps().computes),
            self.worker.take_stored(),
        )
        failed = self.worker.take_failed_requests()
        return KVConnectorTransferResults(
            finished_sending=stored, finished_recving=loaded, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> Stats | None:
        return (self._scheduler or self.worker).tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> PromMetrics:
        return PromMetrics(*args)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    def _steps(self) -> Steps:
        steps = self._get_connector_metadata()
        assert isinstance(steps, Steps)
        return steps


def _blend_model(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    geometry: Geometry,
    settings: Config,
) -> MakeModel | None:
    if selector_of(settings.blend) is None or blend_refusal(vllm_config, geometry, settings):
        return None
    from kvhold.integrations.vllm.blending.model import EngineModel

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return partial(EngineModel, vllm_config, spec, geometry.parts[0])


def _step_tokens(vllm_config: "VllmConfig") -> int:
    scheduling = vllm_config.scheduler_config
    return int(
        min(
            scheduling.max_num_batched_tokens,
            scheduling.long_prefill_token_threshold or scheduling.max_num_batched_tokens,
        )
    )


def _media_of(vllm_config: "VllmConfig") -> Media:
    multimodal = vllm_config.model_config.multimodal_config
    return Media(
        embeddings_may_be_missing=bool(getattr(multimodal, "allow_missing_mm_embeddings", False))
    )


def _log_like_vllm() -> None:
    ours, theirs = logging.getLogger("kvhold"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
