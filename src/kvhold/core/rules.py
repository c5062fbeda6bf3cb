"""What a request may do with the cache: `Rules(store=True, load=True, terms=Terms(), tags=())`, from settings and from the request itself.

    rules = request_rules({"store": False, "tags": {"tenant": "a"}}, RulesConfig())     # ConfigError names what is wrong

A request's word goes over the settings', but what the settings forbid stays forbidden.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvhold.core.config import RulesConfig
from kvhold.core.errors import ConfigError
from kvhold.core.keys import TENANT
from kvhold.core.terms import FREE, MAX_BITS, MAX_TTL_S, Terms

_NAMES = ("store", "load", "plan", "ttl_s", "max_error", "max_bits", "tags")


@dataclass(frozen=True)
class Rules:
    """One request's. plan: it loads no more than is faster than computing it. terms: on which it stores. tags: what must match, beside its
    text; those of its budget among them, so that nobody with a narrower one finds what it stored."""

    store: bool = True
    load: bool = True
    plan: bool = False
    terms: Terms = FREE
    tags: tuple[tuple[str, str], ...] = ()


def request_rules(asked: Any, settings: RulesConfig) -> Rules:
    """The rules of a request that says `asked` (a mapping, or None for nothing). Raises ConfigError for what is not understood."""
    asked = {} if asked is None else asked
    if not isinstance(asked, Mapping):
        raise ConfigError(f"kvhold: must hold some of {', '.join(_NAMES)}, not {asked!r}")
    for name in asked:
        if name not in _NAMES:
            raise ConfigError(f"kvhold.{name}: there is no such rule; known are {', '.join(_NAMES)}")
    tags = dict(_tags(asked.get("tags")))
    if settings.tenant:
        tags.setdefault(TENANT, settings.tenant)
    max_error = _least(asked, "max_error", settings.max_error if settings.max_error < 1 else None, most=1, zero=True)
    max_bits = _least(asked, "max_bits", settings.max_bits or None, most=MAX_BITS)
    budget = {"kvhold.max_error": max_error, "kvhold.max_bits": max_bits}
    ttl_s = _least(asked, "ttl_s", settings.ttl_s or None, most=MAX_TTL_S)
    try:
        terms = Terms(ttl_s=ttl_s, max_error=max_error, max_bits=max_bits, tenant=tags.get(TENANT, ""))
    except ValueError as error:
        raise ConfigError(f"kvhold: {error}") from None
    return Rules(
        store=_flag(asked, "store") and settings.store,
        load=_flag(asked, "load") and settings.load,
        plan=_flag(asked, "plan") and settings.plan,
        terms=terms,
        tags=tuple(sorted((tags | {name: repr(value) for name, value in budget.items() if value is not None}).items())),
    )


def terms_of(tags: Iterable[tuple[str, str]]) -> Terms | None:
    """The budget and the tenant that a namespace's tags name; None where they name what no rule does."""
    named = dict(tags)
    try:
        budget = {name: float(named[f"kvhold.{name}"]) for name in ("max_error", "max_bits") if f"kvhold.{name}" in named}
        return Terms(tenant=named.get(TENANT, ""), **budget)
    except ValueError:
        return None


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name, True)
    if not isinstance(value, bool):
        raise ConfigError(f"kvhold.{name} = {value!r}: must be true or false")
    return value


def _least(asked: Mapping[str, Any], name: str, settings: float | None, *, most: float, zero: bool = False) -> float | None:
    """The smaller of what the request says and what the settings say; None where neither does."""
    value = asked.get(name)
    if value is None:
        return settings
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value <= most or (zero and value == 0)):
        raise ConfigError(f"kvhold.{name} = {value!r}: must be a number {'from' if zero else 'above'} 0 to {most:g}")
    return float(value) if settings is None else min(float(value), settings)


def _tags(asked: Any) -> tuple[tuple[str, str], ...]:
    if asked is None:
        return ()
    if not isinstance(asked, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in asked.items()):
        raise ConfigError(f"kvhold.tags = {asked!r}: must be names and values, all of them text")
    if own := next((name for name in asked if name.startswith("kvhold.")), None):
        raise ConfigError(f"kvhold.tags: {own!r} is a name of kvhold's own; take another one")
    return tuple(sorted(asked.items()))
