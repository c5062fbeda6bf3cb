"""How a request may use the cache: as the settings allow, or less, and for no other tenant."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvhold.core.api import Uses
from kvhold.core.config import RulesConfig
from kvhold.core.errors import ConfigError
from kvhold.core.keys import TENANT, budget_tags
from kvhold.core.store_options import DEFAULT_OPTIONS, MAX_BITS, MAX_TTL_S, StoreOptions
from kvhold.core.tags import tag_digests

_NAMES = (
    "store",
    "load",
    "plan",
    "wait_for_computing",
    "ttl_s",
    "max_error",
    "max_bits",
    "tags",
)
_MOST_QUOTED = 100


@dataclass(frozen=True)
class RequestRules:
    """plan: load only where loading is faster than computing
    tags: with its budget for loss; parts of the namespace
    wait_for_computing: wait for chunks that another engine computes
    """

    store: bool = True
    load: bool = True
    plan: bool = False
    store_options: StoreOptions = DEFAULT_OPTIONS
    tags: tuple[tuple[str, str], ...] = ()
    wait_for_computing: bool = False

    @property
    def uses(self) -> Uses:
        return "all" if self.store else "known"


def request_rules(asked: Any, settings: RulesConfig) -> RequestRules:
    """Raises ConfigError for an unknown rule or an invalid value."""
    asked = {} if asked is None else asked
    if not isinstance(asked, Mapping):
        raise ConfigError(f"kvhold: must hold some of {', '.join(_NAMES)}, not {_quoted(asked)}")
    for name in asked:
        if name not in _NAMES:
            raise ConfigError(
                f"kvhold.{str(name)[:_MOST_QUOTED]}: there is no such rule; known are "
                f"{', '.join(_NAMES)}"
            )
    tags = _with_tenant(_tags(asked.get("tags")), settings)
    max_error = _least(asked, "max_error", settings.max_error, most=1, zero=True)
    max_bits = _least(asked, "max_bits", settings.max_bits or None, most=MAX_BITS)
    ttl_s = _least(asked, "ttl_s", settings.ttl_s or None, most=MAX_TTL_S)
    try:
        store_options = StoreOptions(
            ttl_s=ttl_s,
            max_error=max_error,
            max_bits=max_bits,
            tenant=tags.get(TENANT, ""),
            tags=tag_digests(tags.items()),
        )
    except ValueError as error:
        raise ConfigError(f"kvhold: {error}") from None
    return RequestRules(
        store=_flag(asked, "store") and settings.store,
        load=_flag(asked, "load") and settings.load,
        plan=_flag(asked, "plan") and settings.plan,
        wait_for_computing=_flag(asked, "wait_for_computing") and settings.wait_for_computing,
        store_options=store_options,
        tags=tuple(sorted((*tags.items(), *budget_tags(store_options)))),
    )


def check_tags(tags: Iterable[tuple[str, str]], settings: RulesConfig) -> None:
    """Raise ConfigError unless `tags` name the configured tenant."""
    if settings.tenant and dict(tags).get(TENANT) != settings.tenant:
        raise ConfigError(
            "rules: the tag 'tenant' is not the configured rules.tenant; make the rules "
            "with request_rules"
        )


def store_options_of(tags: Iterable[tuple[str, str]]) -> StoreOptions | None:
    """None: invalid tags."""
    named = dict(tags)
    try:
        budget = {
            name: float(named[f"kvhold.{name}"])
            for name in ("max_error", "max_bits")
            if f"kvhold.{name}" in named
        }
        digests = tag_digests(named.items())
        return StoreOptions(tenant=named.get(TENANT, ""), tags=digests, **budget)
    except ValueError:
        return None


def _with_tenant(tags: Mapping[str, str], settings: RulesConfig) -> dict[str, str]:
    if not settings.tenant:
        return dict(tags)
    if (named := tags.get(TENANT, settings.tenant)) != settings.tenant:
        raise ConfigError(
            f"kvhold.tags.tenant = {_quoted(named)}: the engine's setting rules.tenant "
            "names another tenant; leave this tag out"
        )
    return {**tags, TENANT: settings.tenant}


def _quoted(value: Any) -> str:
    text = value[: _MOST_QUOTED + 1] if isinstance(value, str) else value
    shown = repr(text)
    return shown if len(shown) <= _MOST_QUOTED else f"{shown[:_MOST_QUOTED]}..."


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name, True)
    if not isinstance(value, bool):
        raise ConfigError(f"kvhold.{name} = {_quoted(value)}: must be true or false")
    return value


def _least(
    asked: Mapping[str, Any], name: str, settings: float | None, *, most: float, zero: bool = False
) -> float | None:
    value = asked.get(name)
    if value is None:
        return settings
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (0 < value <= most or (zero and value == 0))
    ):
        raise ConfigError(
            f"kvhold.{name} = {_quoted(value)}: must be a number "
            f"{'from' if zero else 'above'} 0 to {most:g}"
        )
    return float(value) if settings is None else min(float(value), settings)


def _tags(asked: Any) -> Mapping[str, str]:
    if asked is None:
        return {}
    if not isinstance(asked, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in asked.items()
    ):
        raise ConfigError(
            f"kvhold.tags = {_quoted(asked)}: must map names to values, all of them text"
        )
    if own := next((name for name in asked if name.startswith("kvhold.")), None):
        raise ConfigError(
            f"kvhold.tags: {_quoted(own)} is reserved, as all names with kvhold.; use another one"
        )
    return asked
