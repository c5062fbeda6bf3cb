import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, KVHoldError, LayoutError
from kvhold.core.hints import OWN_FIELDS
from kvhold.core.keys import Insert, Namespace, Prompt
from kvhold.core.naming import Facts
from kvhold.core.rules import RequestRules, request_rules
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.media import Media, MediaError
from kvhold.integrations.vllm.naming.adapters import Adapters
from kvhold.integrations.vllm.naming.places import check_weights, other_models
from kvhold.integrations.vllm.naming.walk import engine_facts, machine_facts
from kvhold.integrations.weights import code_identity, model_identity
from kvhold.memory.coding import ERROR_BOUND
from kvhold.node import NodeClient, connect

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_UNKNOWN = "\0"  # the name of an unidentified adapter
_NO_MEDIA = "its images, video or audio cannot be identified"


def namespace_of(
    config: "VllmConfig", kv_cache: "KVCacheConfig", geometry: Geometry, settings: Config
) -> Namespace:
    """Only engines with equal KV share it.

    Raises LayoutError: unidentified weights, code or settings.
    """
    model = config.model_config
    if model.model_weights and not settings.model_id:
        raise LayoutError(
            f"cannot identify the weights at {model.model_weights} by their content; set model_id"
        )
    cache_dir = config.load_config.download_dir
    if not settings.model_id:
        check_weights(config.load_config, model.model)
    facts = dict(engine_facts(config, kv_cache, settings).items) | _model_facts(config, settings)
    return Namespace(
        model=settings.model_id or model_identity(model.model, model.revision, cache_dir=cache_dir),
        layout=geometry.layout,
        dtype=str(model.dtype),
        quantization=str(model.quantization or ""),
        shards=geometry.shards,
        facts=Facts.of(facts),
        title=str(model.model),
    )


def host_facts(config: "VllmConfig", settings: Config) -> tuple[tuple[str, str], ...]:
    """Raises LayoutError."""
    model, facts = config.model_config, _model_facts(config, settings)
    if not settings.model_id:
        facts["weights"] = model_identity(
            model.model, model.revision, cache_dir=config.load_config.download_dir
        )
    return (*machine_facts(config, settings).items, *Facts.of(facts).items)


def _model_facts(config: "VllmConfig", settings: Config) -> dict[str, str]:
    facts: dict[str, str] = {}
    if settings.model_id:
        return facts
    model, cache_dir = config.model_config, config.load_config.download_dir
    for name, other in other_models(model.hf_config):
        facts[f"weights.{name}"] = model_identity(other, None, cache_dir=cache_dir)
    if model.trust_remote_code:
        for code in code_identity(
            model.model, getattr(model.hf_config, "auto_map", None), model.code_revision
        ):
            facts[f"code.{code}"] = "'used'"
    return facts


def layout_only(geometry: Geometry) -> Namespace:
    """A worker's keys come from the scheduler."""
    return Namespace(model="", layout=geometry.layout, shards=geometry.shards)


def usual(config: Config, namespace: Namespace) -> Namespace:
    """Of requests without an adapter, a salt or tags of their own."""
    return namespace.narrowed(tags=request_rules(None, config.rules).tags)


def join(config: Config, namespace: Namespace, *, name: str) -> NodeClient:
    """Connect and register. Raises NodeError.

    If the node is lost right after, the engine starts without it.
    """
    client = connect(config, name=name)
    try:
        client.register(usual(config, namespace))
    except KVHoldError as error:
        log.warning("kvhold: %s; starting without the node", error)
    return client


def rules_of(request: "Request", config: Config, *, is_coded: bool) -> RequestRules:
    """Raises ConfigError: unknown words, or an error bound that `memory_codec` exceeds."""
    asked = (request.kv_transfer_params or {}).get("kvhold")
    if isinstance(asked, Mapping):
        asked = {name: value for name, value in asked.items() if name not in OWN_FIELDS}
    rules = request_rules(asked, config.rules)
    most = rules.store_options.max_error
    if is_coded and most is not None and most < ERROR_BOUND:
        raise ConfigError(
            f"kvhold.max_error = {most:g}: the engine's memory_codec {config.memory_codec} "
            f"loses up to {ERROR_BOUND:.4f}"
        )
    return rules


def prompt_of(
    namespace: Namespace, request: "Request", rules: RequestRules, adapters: Adapters, media: Media
) -> Prompt | str:
    """The prompt, or why its KV cannot be named. Call it for every request, in the order of
    arrival.
    """
    inserts = _inserts_of(request, media)
    lora = ""
    if request.lora_request is not None:
        lora = (
            adapters.name_of(request.lora_request, has_media=bool(request.mm_features)) or _UNKNOWN
        )
    if (
        request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or request.prompt_is_token_ids is not None
    ):
        return "its prompt contains embeddings"
    if request.pooling_params:
        return "it is a pooling request"
    if lora == _UNKNOWN:
        return (
            f"adapter {request.lora_request.lora_name} cannot be identified, has changed, or "
            "is newer than the engine"
        )
    if isinstance(inserts, str):
        return inserts
    tokens = np.array(request.prompt_token_ids, dtype=np.int32)
    space = namespace.narrowed(lora=lora, cache_salt=request.cache_salt or "", tags=rules.tags)
    try:
        return space.prompt(tokens, inserts=inserts)
    except ValueError as error:
        log.debug("kvhold: %s", error)
        return _NO_MEDIA


def _inserts_of(request: "Request", media: Media) -> list[Insert] | str:
    try:
        return media.inserts_of(request)
    except MediaError as error:
        return str(error)
    except TypeError as error:
        log.debug("kvhold: %s", error)
        return _NO_MEDIA
