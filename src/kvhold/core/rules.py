"""What a request may do with the cache: `Rules(store=True, load=True, ttl_s=0, tags=())`, from settings and from the request itself.

    rules = request_rules({"store": False, "tags": {"tenant": "a"}}, RulesConfig())     # ConfigError names what is wrong

A request's word goes over the settings', but what the settings forbid stays forbidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from kvhold.core.config import RulesConfig
from kvhold.core.errors import ConfigError

_NAMES = ("store", "load", "ttl_s", "tags")


@dataclass(frozen=True)
class Rules:
    """One request's. ttl_s: what it stores is not to be used after so long; None: no limit. tags: what must match, beside its text."""

    store: bool = True
    load: bool = True
    ttl_s: float | None = None
    tags: tuple[tuple[str, str], ...] = ()


def request_rules(asked: Any, settings: RulesConfig) -> Rules:
    """The rules of a request that says `asked` (a mapping, or None for nothing). Raises ConfigError for what is not understood."""
    asked = {} if asked is None else asked
    if not isinstance(asked, Mapping):
        raise ConfigError(f"kvhold: must hold some of {', '.join(_NAMES)}, not {asked!r}")
    for name in asked:
        if name not in _NAMES:
            raise ConfigError(f"kvhold.{name}: there is no such rule; known are {', '.join(_NAMES)}")
    ttl_s = _ttl(asked.get("ttl_s"), settings.ttl_s or None)
    return Rules(
        store=_flag(asked, "store") and settings.store,
        load=_flag(asked, "load") and settings.load,
        ttl_s=ttl_s,
        tags=_tags(asked.get("tags")),
    )


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name, True)
    if not isinstance(value, bool):
        raise ConfigError(f"kvhold.{name} = {value!r}: must be true or false")
    return value


def _ttl(asked: Any, most_s: float | None) -> float | None:
    if asked is None:
        return most_s
    if isinstance(asked, bool) or not isinstance(asked, (int, float)) or not 0 < asked < inf:
        raise ConfigError(f"kvhold.ttl_s = {asked!r}: must be a number of seconds above 0")
    return float(asked) if most_s is None else min(float(asked), most_s)


def _tags(asked: Any) -> tuple[tuple[str, str], ...]:
    if asked is None:
        return ()
    if not isinstance(asked, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in asked.items()):
        raise ConfigError(f"kvhold.tags = {asked!r}: must be names and values, all of them text")
    return tuple(sorted(asked.items()))
