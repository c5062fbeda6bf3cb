"""The JSON that a user gives SGLang, read: `storage_settings(extra_config)`,
`linker_settings(linker_extra_config)`.

    {"backend_name": "kvhold", ..., "interface_v1": 1, "kvhold": {"ram_bytes": "8GiB", "embedded":
    false, "model_id": "llama@3f2a"}}

The section holds any setting of `core.config.Config` (environment and file count too, as
everywhere) and the two that only SGLang needs. A page of SGLang's is a chunk, so `tokens_per_chunk`
has no say here. What is not understood is a ConfigError that names the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kvhold.cache import LocalCache
from kvhold.core.api import Cache
from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError
from kvhold.node import connect

SECTION = "kvhold"
_OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
)  # in the same object, read by SGLang itself
KV_DTYPES = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}  # as SGLang spells them, as we do


@dataclass(frozen=True)
class Settings:
    """config:   kvhold's own
    embedded: the cache is in this process, instead of this host's node
    kv_dtype: what SGLang's pools of bare bytes (uint8) hold, in our spelling; empty: as SGLang's
        own settings say
    """

    config: Config
    embedded: bool = False
    kv_dtype: str = ""

    def open(self, name: str) -> Cache:
        """The cache.

        Raises NodeError when no node can be had, CapacityError when memory for an embedded one
        cannot.
        """
        return LocalCache(self.config) if self.embedded else connect(self.config, name=name)


def storage_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Of the storage's extra config, as SGLang hands it on (less what it has taken out
    for itself).
    """
    extra_config = extra_config or {}
    for name in extra_config:
        if name not in (*_OF_SGLANG, SECTION):
            raise ConfigError(
                f"extra config: {name!r} is not a field here; settings of kvhold go into "
                f"its section {SECTION!r}"
            )
    section = extra_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"extra config: {SECTION} is a section of settings, not {section!r}")
    return _settings(section, f"extra config: {SECTION}.")


def linker_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Of the linker's extra config, all of which is ours."""
    return _settings(extra_config or {}, "linker_extra_config: ")


def _settings(section: Mapping[str, Any], where: str) -> Settings:
    values = dict(section)
    embedded, kv_dtype = values.pop("embedded", False), values.pop("kv_cache_dtype", "")
    if not isinstance(embedded, bool):
        raise ConfigError(f"{where}embedded = {embedded!r}: must be true or false")
    if kv_dtype not in ("", *KV_DTYPES):
        near = get_close_matches(str(kv_dtype), KV_DTYPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{where}kv_cache_dtype = {kv_dtype!r}: must be one of {', '.join(KV_DTYPES)}{hint}"
        )
    try:
        config = load_config(values)
    except ConfigError as error:
        raise ConfigError(f"{where.rstrip('. ').removesuffix(':')}: {error}") from None
    if config.memory_codec != "none":
        raise ConfigError(
            f"{where}memory_codec = {config.memory_codec!r}: SGLang's KV is kept as it is; "
            "leave this setting out"
        )
    return Settings(config, embedded, KV_DTYPES.get(kv_dtype, ""))
