"""The names of this engine's KV: vLLM's configuration to a Namespace, and a request to a Prompt, or a refusal that says why."""

import json
import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from kvhold.core.config import Config, RulesConfig
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.rules import Rules, request_rules
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.media import Media
from kvhold.integrations.weights import model_identity
from kvhold.node import NodeClient, connect

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_NOT_KV = ("_name_or_path", "transformers_version")  # of a model's settings: where the folder lies, and who wrote it down


def namespace_of(config: "VllmConfig", geometry: Geometry, settings: Config) -> Namespace:
    """The namespace of this engine: the same for all engines whose KV is equal, and for no others. Raises LayoutError."""
    model = config.model_config
    if model.model_weights and not settings.model_id:
        raise LayoutError(f"cannot tell the weights at {model.model_weights} by their content; set model_id")
    return Namespace(
        model=settings.model_id or model_identity(model.model, model.revision),
        layout=geometry.layout,
        revision=" ".join(
            [_config_digest(model.hf_config, model.max_model_len), str(config.load_config.load_format), *_variants(config, settings)]
        ),
        dtype=str(model.dtype),
        quantization=str(model.quantization or ""),
        shards=geometry.shards,
    )


def _variants(config: "VllmConfig", settings: Config) -> list[str]:
    """What else the numbers depend on: their type, and how workers split sums, unless they are to share all the same."""
    width, cache_dtype = config.parallel_config.tensor_parallel_size, config.cache_config.cache_dtype
    variants = [f"kv={cache_dtype}"] if cache_dtype != "auto" else []
    return variants + ([f"tp={width}"] if width > 1 and not settings.head_shards else [])


def join(config: Config, namespace: Namespace, *, name: str) -> NodeClient:
    """This host's node, told of the namespace. Raises NodeError when none can be had; one that is lost right after that is looked for."""
    client = connect(config, name=name)
    try:
        client.register(namespace)
    except KVHoldError as error:
        log.warning("kvhold: %s; starting without the node", error)
    return client


def rules_of(request: "Request", settings: RulesConfig) -> Rules:
    """What the request may do with the cache: `kv_transfer_params: {"kvhold": {...}}`. Raises ConfigError for what is not understood."""
    return request_rules((request.kv_transfer_params or {}).get("kvhold"), settings)


def prompt_of(
    namespace: Namespace, request: "Request", rules: Rules, adapters: dict[tuple[int, str, str], str], media: Media
) -> Prompt | None:
    """The request's prompt, by name; None when its KV depends on more than its tokens, media, adapter and salt, or these cannot be told.

    adapters: the names of those seen so far, by vLLM's number, name and path; it is filled here. An engine keeps the adapter it has
    loaded, whatever becomes of its files.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return None
    if request.pooling_params or (inserts := media.inserts_of(request)) is None:
        return None
    lora = ""
    if (adapter := request.lora_request) is not None:
        known_as = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        if known_as not in adapters or adapter.load_inplace:
            try:
                adapters[known_as] = f"{adapter.lora_name}={model_identity(adapter.lora_path, None)}"
            except LayoutError as error:
                log.debug("kvhold: %s", error)
                return None
        lora = adapters[known_as]
    tokens = np.array(request.prompt_token_ids, dtype=np.int32)
    space = namespace.narrowed(lora=lora, cache_salt=request.cache_salt or "", tags=rules.tags)
    try:
        return space.prompt(tokens, inserts=inserts)
    except ValueError as error:  # contents that lie over each other, such as a video and its sound
        log.debug("kvhold: %s", error)
        return None


def _config_digest(hf_config: Any, max_model_len: int) -> str:
    """The model's settings with whatever was overridden at start (rotary scaling, for one): they shape the KV as the weights do."""
    settings = _without_places(hf_config.to_dict())
    text = json.dumps(settings, sort_keys=True, default=str)
    if "longrope" in text:
        text += f" {max_model_len}"  # vLLM chooses between the long and the short factors by it
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _without_places(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {name: _without_places(value) for name, value in settings.items() if name not in _NOT_KV}
    return settings
