"""Settings that a running node may change. In the node's loop."""

import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvhold.cache.scrub import Scrubber
from kvhold.cache.state import CacheState
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.setting import apply, unknown_setting
from kvhold.core.sizes import format_size, parse_size

LIVE = (
    "ram_bytes",
    "namespace_quota_bytes",
    "write_behind_bytes",
    "scrub_interval_s",
    "drain_timeout_s",
)
_LOG_LEVEL, _QUOTAS = "log_level", "namespace_quotas"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MOST_QUOTAS = 4096
_OF_ENGINES = "it belongs to the engines: change it where they start"
_OF_OTHERS = "it belongs to another process: change it where that starts"
_AT_START = "the node reads it when it starts: change it there, and restart the node"
_WHY_NOT = {
    "tiers": "tiers are opened, and their clears resumed, when the node starts",
    "policy": "the order of eviction is kept from the start",
    "huge_pages": "memory is mapped when the node starts",
    "client": _OF_ENGINES,
    "rules": _OF_ENGINES,
    "control": _OF_OTHERS,
    "proxy": _OF_OTHERS,
}


class LiveSettings:
    def __init__(self, config: Config, state: CacheState, scrubber: Scrubber) -> None:
        self._config = config
        self._state = state
        self._scrubber = scrubber

    @property
    def drain_timeout_s(self) -> float:
        return self._config.drain_timeout_s

    def values(self) -> dict[str, Any]:
        ram = self._state.ram
        return {
            "ram_bytes": ram.limits.total_bytes or ram.capacity_bytes,
            "namespace_quota_bytes": ram.limits.namespace_bytes,
            "write_behind_bytes": self._state.write_behind_bytes,
            "scrub_interval_s": self._scrubber.interval_s,
            "drain_timeout_s": self._config.drain_timeout_s,
            _LOG_LEVEL: logging.getLevelName(logging.getLogger("kvhold").getEffectiveLevel()),
            _QUOTAS: {
                namespace.hex(): nbytes for namespace, nbytes in ram.limits.of_namespaces.items()
            },
        }

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change all, or none. Raises ConfigError that names the setting."""
        level = _as_level(changes[_LOG_LEVEL]) if _LOG_LEVEL in changes else None
        quotas = self._as_quotas(changes[_QUOTAS]) if _QUOTAS in changes else None
        named = {
            name: value for name, value in changes.items() if name not in (_LOG_LEVEL, _QUOTAS)
        }
        for name in named:
            _check_live(name)
        config = apply(self._config, named, source="settings")
        self._check(config, named)
        if level is not None:
            logging.getLogger("kvhold").setLevel(level)
        self._config = config
        self._use(config, named, quotas)

    def _check(self, config: Config, named: Mapping[str, Any]) -> None:
        capacity_bytes = self._state.ram.capacity_bytes
        if "ram_bytes" in named and not 0 < config.ram_bytes <= capacity_bytes:
            raise ConfigError(
                f"settings: ram_bytes = {config.ram_bytes}: the node has {capacity_bytes} bytes "
                f"({format_size(capacity_bytes)}) since its start; a running node uses at most "
                "these, and at least 1"
            )
        for name in ("write_behind_bytes", "scrub_interval_s"):
            if name in named and not getattr(config, name):
                raise ConfigError(f"settings: {name} = 0: a running node needs a value above 0")
        if "scrub_interval_s" in named and not self._scrubber.interval_s:
            raise ConfigError(
                "settings: scrub_interval_s: checking was off when the node started; restart it"
            )

    def _use(
        self, config: Config, named: Mapping[str, Any], quotas: Mapping[bytes, int] | None
    ) -> None:
        limits = self._state.ram.limits
        if "ram_bytes" in named:
            limits = replace(limits, total_bytes=config.ram_bytes)
        if "namespace_quota_bytes" in named:
            limits = replace(limits, namespace_bytes=config.namespace_quota_bytes)
        if quotas is not None:
            limits = replace(limits, of_namespaces=dict(quotas))
        if "write_behind_bytes" in named:
            self._state.write_behind_bytes = config.write_behind_bytes
        if "scrub_interval_s" in named:
            self._scrubber.interval_s = config.scrub_interval_s
        self._state.limit_memory(limits)

    def _as_quotas(self, given: Any) -> dict[bytes, int]:
        if not isinstance(given, Mapping):
            raise ConfigError(f"settings: {_QUOTAS}: must be a table of namespaces and sizes")
        quotas = dict(self._state.ram.limits.of_namespaces)
        for digest, nbytes in given.items():
            namespace = _as_digest(digest)
            try:
                quotas[namespace] = parse_size(nbytes)
            except ValueError as error:
                raise ConfigError(f"settings: {_QUOTAS}.{digest} = {nbytes!r}: {error}") from None
            if not quotas[namespace]:
                del quotas[namespace]
        if len(quotas) > _MOST_QUOTAS:
            raise ConfigError(f"settings: {_QUOTAS}: at most {_MOST_QUOTAS} namespaces have one")
        return quotas


def _check_live(name: str) -> None:
    section = name.partition(".")[0]
    known = [each.name for each in fields(Config)]
    if section not in known:
        raise unknown_setting(str(name)[:80], [*LIVE, _LOG_LEVEL, _QUOTAS], "settings")
    if name in LIVE:
        return
    is_section = is_dataclass(getattr(Config(), section))
    what = f"{section} (a section)" if is_section else section
    raise ConfigError(
        f"settings: {what} cannot change in a running node: {_WHY_NOT.get(section, _AT_START)}"
    )


def _as_level(given: Any) -> str:
    if not isinstance(given, str) or given.upper() not in _LEVELS:
        raise ConfigError(
            f"settings: {_LOG_LEVEL} = {str(given)[:40]!r}: must be one of {', '.join(_LEVELS)}"
        )
    return given.upper()


def _as_digest(given: Any) -> bytes:
    try:
        digest = bytes.fromhex(given)
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != NAMESPACE_BYTES:
        raise ConfigError(
            f"settings: {_QUOTAS}: {str(given)[:40]!r} is no digest of a namespace, of "
            f"{2 * NAMESPACE_BYTES} hexadecimal digits"
        )
    return digest
