"""SGLang's JSON. A page is a chunk, so `tokens_per_chunk` has no effect."""

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
)
KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class SGLangSettings:
    """embedded: the cache is in this process
    kv_dtype: of pools of bare bytes; empty: as SGLang says
    """

    config: Config
    embedded: bool = False
    kv_dtype: str = ""

    def open(self, name: str) -> Cache:
        """Raises NodeError, or CapacityError: an embedded cache."""
        return LocalCache(self.config) if self.embedded else connect(self.config, name=name)


def storage_settings(extra_config: Mapping[str, Any] | None) -> SGLangSettings:
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


def linker_settings(extra_config: Mapping[str, Any] | None) -> SGLangSettings:
    return _settings(extra_config or {}, "linker_extra_config: ")


def _settings(section: Mapping[str, Any], where: str) -> SGLangSettings:
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
    return SGLangSettings(config, embedded, KV_DTYPES.get(kv_dtype, ""))
