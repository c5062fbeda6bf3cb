"""The set-ups that real vLLM engines ran on a GPU (docs/gpu.md).

Anything else on a GPU needs `allow_unproven`.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config.compilation import CompilationMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from kvhold.core.config import Config
from kvhold.core.errors import LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

_RELEASE = "0.32."
_CAPABILITIES = ((9, 0),)  # Hopper
_LAYOUT = "LBNHC"
_FLASH_VERSIONS = (None, 3)
_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
_STATES = (MambaAttentionBackendEnum.SHORT_CONV,)
_SPECULATION = ("ngram", "draft_model")
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASH_ATTN_MLA", "TRITON_MLA", "SHORT_CONV_ATTN")


def device_of_kv() -> str | None:
    """None: the CPU"""
    return None if current_platform.is_cpu() else str(current_platform.device_name)


def capability() -> tuple[int, int] | None:
    """Of an NVIDIA GPU; None: another device."""
    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if found is None else (found.major, found.minor)


def not_shown(config: "VllmConfig", specs: Sequence[Any], settings: Config) -> list[str]:
    """The unproven parts of a set-up on a GPU; empty on CPUs."""
    device = device_of_kv()
    return [] if device is None else list(_not_shown(device, config, specs, settings))


def _not_shown(
    device: str, config: "VllmConfig", specs: Sequence[Any], settings: Config
) -> Iterator[str]:
    version = capability()
    if version is None:
        yield f"the device {device}"
    elif version not in _CAPABILITIES:
        yield f"GPUs of compute capability {version[0]}.{version[1]}"
    if not vllm.__version__.startswith(_RELEASE):
        yield f"vLLM {vllm.__version__}"
    if config.parallel_config.world_size > 1:
        yield "several GPUs"
    if config.compilation_config.mode not in (None, CompilationMode.NONE):
        yield "compiled passes (--enforce-eager, or a compilation_config with mode 0)"
    if config.model_config.enable_sleep_mode:
        yield "sleep mode"
    if (layout := config.cache_config.kv_cache_layout) != _LAYOUT:
        yield f"KV arranged as {layout}"
    if (dtype := config.cache_config.cache_dtype) not in _CACHE_DTYPES:
        yield f"kv_cache_dtype {dtype}"
    if settings.memory_codec != "none":
        yield f"memory_codec {settings.memory_codec}"
    attention = config.attention_config
    if (flash := attention.flash_attn_version) not in _FLASH_VERSIONS:
        yield f"FlashAttention {flash}"
    for spec in specs:
        if isinstance(spec, MambaSpec) and spec.mamba_type not in _STATES:
            yield f"states of {spec.mamba_type.name.lower()}"
    speculation = config.speculative_config
    if speculation is not None and speculation.method not in _SPECULATION:
        yield f"speculation by {speculation.method}"


def backends_not_shown(config: "VllmConfig") -> list[str]:
    """Call it in a worker, where vLLM has chosen them. Empty on CPUs."""
    if device_of_kv() is None:
        return []
    found = {
        layer.get_attn_backend().get_name()
        for layer in config.compilation_config.static_forward_context.values()
        if isinstance(layer, AttentionLayerBase)
    }
    return [f"the attention backend {name}" for name in sorted(found - set(_BACKENDS))]


def judge(unshown: Sequence[str], settings: Config) -> None:
    """Raises LayoutError."""
    if not unshown:
        return
    if not settings.allow_unproven:
        raise LayoutError(
            "kvhold does not serve this set-up yet, because its KV is not proven to come back "
            f"exactly: {sentence(unshown)} (allow_unproven = true serves it if the check at start "
            "passes)"
        )
    log.warning("kvhold: %s; kvhold serves it because allow_unproven is set", sentence(unshown))


def sentence(unshown: Sequence[str]) -> str:
    return f"on a GPU, nothing was shown for {', '.join(unshown)}"
