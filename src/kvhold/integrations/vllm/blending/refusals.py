from dataclasses import replace
from typing import TYPE_CHECKING

from kvhold.blend.spans import refusal
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.layout import CANONICAL, Layout
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.shown import device_of_kv
from kvhold.kernels.rope import Rope

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def blend_refusal(config: "VllmConfig", geometry: Geometry, settings: Config) -> str:
    """Why requests of this engine cannot be blended, as far as its settings tell; or empty."""
    groups = [part.group for part in geometry.parts]
    reasons = {
        f"it was not shown on {device_of_kv()}": device_of_kv() is not None,
        "the engine has several workers": config.parallel_config.world_size_across_dp > 1,
        "the engine has adapters": config.lora_config is not None,
        "the engine speculates": config.speculative_config is not None,
        "layerwise is set": settings.layerwise,
        "memory_codec is set": settings.memory_codec != "none",
        "head_shards is set": geometry.shards > 1,
        "its KV is latent (MLA)": any(
            group.planes != 2 and group.attention != "state" for group in groups
        ),
    }
    found = next((reason for reason, applies in reasons.items() if applies), "")
    if found:
        return found
    # the worker reads the engine's packing
    plain = Layout(
        tuple(replace(group, packing=CANONICAL, block_tokens=0, block_bytes=0) for group in groups),
        tokens_per_chunk=geometry.layout.tokens_per_chunk,
    )
    try:
        return refusal(plain, rope_of(config))
    except KVHoldError as error:
        return str(error)


def rope_of(config: "VllmConfig") -> Rope:
    """Raises ConfigError, LayoutError."""
    rope = Rope.of(config.model_config.hf_text_config.to_dict())
    if rope.scaling.kind == "dynamic":
        raise LayoutError("its rotary embedding (dynamic) depends on the prompt's length")
    return rope
