"""Make tiers from URLs. Only plugins in the settings run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Protocol

from kvhold.core.errors import ConfigError, KVHoldError
from kvhold.tiers.base import Tier
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.url import TierUrl, parse_url

ENTRY_POINTS = "kvhold.tiers"
PLUGIN_SCHEME = "plugin"

_GUARD_OPTIONS = {f.name: f for f in fields(GuardConfig)}


@dataclass(frozen=True)
class _Home:
    module: str
    name: str
    extra: str | None = None


_DISK, _FS = _Home("kvhold.tiers.disk", "DiskTier"), _Home("kvhold.tiers.fs", "SharedFilesTier")
_REDIS = _Home("kvhold.tiers.redis", "RedisTier")
_CENTRAL = _Home("kvhold.tiers.central", "CentralTier")
_TIERS = {
    "memory": _Home("kvhold.tiers.memory", "MemoryTier"),
    "disk": _DISK,
    "fs": _FS,
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "redis-sentinel": _REDIS,
    "redis-cluster": _REDIS,
    "valkey": _REDIS,
    "valkeys": _REDIS,
    "valkey-sentinel": _REDIS,
    "valkey-cluster": _REDIS,
    "memcached": _Home("kvhold.tiers.memcached", "MemcachedTier"),
    "s3": _Home("kvhold.tiers.s3", "S3Tier", "s3"),
    "mooncake": _Home("kvhold.tiers.mooncake", "MooncakeTier", "mooncake"),
    "infinistore": _Home("kvhold.tiers.infinistore", "InfiniStoreTier", "infinistore"),
    "kvhold": _CENTRAL,
    "kvholds": _CENTRAL,
    "peers": _Home("kvhold.tiers.peers", "PeersTier"),
    "peers-etcd": _Home("kvhold.tiers.peers.etcd", "EtcdPeersTier", "etcd"),
    "peers-dns": _Home("kvhold.tiers.peers.dns", "DnsPeersTier"),
    "null": _Home("kvhold.tiers.null", "NullTier"),
}
_ELSEWHERE = {  # LMCache's schemes
    "lm": "kvhold://HOST:PORT, a central cache (`kvhold serve --listen`)",
    "mooncakestore": "mooncake://HOST:PORT",
    "external": "plugin://module:Class",
    "blackhole": "null://",
    "file": "disk:///PATH, or fs:///PATH for a shared file system",
}
_WRAPPERS = {
    "audit": _Home("kvhold.tiers.audit", "AuditTier"),
    "faults": _Home("kvhold.tiers.faults", "FaultTier"),
}


class TierClass(Protocol):
    from_url: Callable[[TierUrl], Tier]


def make_tier(text: str, *, plugins: Sequence[str] = ()) -> tuple[Tier, GuardConfig]:
    """plugins: the allowed ones: names of entry points, and "module:Class"

    Raises ConfigError.
    """
    url = parse_url(text)
    *wrappers, scheme = url.scheme.split("+")
    settings = guard_settings(url)
    settings = replace(settings, name=settings.name or scheme)
    inner = url.without(_GUARD_OPTIONS)
    wraps = [(_wrapper(name, url), name) for name in wrappers]
    own = [{k: v for k, v in inner.options.items() if k in wrap.option_names} for wrap, _ in wraps]
    for options in own:
        inner = inner.without(options)
    tier = _make(
        _tier_class(scheme, inner, plugins),
        TierUrl(scheme, inner.netloc, inner.path, inner.options),
    )
    for (wrap, _), options in zip(reversed(wraps), reversed(own), strict=True):
        tier = wrap.from_url(tier, options, url.shown)
    return tier, settings


def place_of(text: str) -> str:
    """A digest of the URL without its guard's options and credentials. Raises ConfigError.

    A store may have several (see `journal.py`).
    """
    url = parse_url(text).without(_GUARD_OPTIONS)
    options = sorted(url.options.items())
    parts = (url.scheme, url.netloc.rpartition("@")[2], url.path, repr(options))
    return blake2b("\0".join(parts).encode(), digest_size=8, person=b"kvhold-place").hexdigest()


def guard_settings(url: TierUrl) -> GuardConfig:
    return _take(url, _GUARD_OPTIONS).apply(GuardConfig())


def _make(tier_class: TierClass, url: TierUrl) -> Tier:
    try:
        return tier_class.from_url(url)
    except KVHoldError:
        raise
    except Exception as error:
        raise ConfigError(f"tiers: {url.shown}: {type(error).__name__}: {error}") from error


def tier_schemes() -> tuple[str, ...]:
    return tuple(sorted({*_TIERS, *_plugins(), PLUGIN_SCHEME}))


def tier_options(scheme: str) -> list[tuple[str, object, str]]:
    """`(name, default, help)` of each option of one of kvhold's own tiers.

    scheme: "": the options that all tiers share

    Raises ConfigError: unknown, or a package is missing.
    """
    if not scheme:
        return [
            (name, option.default, option.metadata["help"])
            for name, option in _GUARD_OPTIONS.items()
        ]
    if scheme not in _TIERS:
        raise ConfigError(f"kvhold has no tier {scheme!r}; known are {', '.join(sorted(_TIERS))}")
    home = _TIERS[scheme]
    settings = getattr(_load_module(home, scheme), home.name.replace("Tier", "Config"), None)
    return (
        []
        if settings is None
        else [(f.name, f.default, f.metadata["help"]) for f in fields(settings)]
    )


class _Wrapper(Protocol):
    option_names: frozenset[str]
    from_url: Callable[[Tier, Mapping[str, str], str], Tier]


def _wrapper(name: str, url: TierUrl) -> _Wrapper:
    if name not in _WRAPPERS:
        raise ConfigError(
            f"tiers: {url.shown}: {name!r} wraps no tier; {', '.join(sorted(_WRAPPERS))} do"
        )
    wrapper: _Wrapper = _load(_WRAPPERS[name], url)
    return wrapper


def _tier_class(scheme: str, url: TierUrl, plugins: Sequence[str]) -> TierClass:
    found: TierClass
    if scheme == PLUGIN_SCHEME:
        found = _load_plugin(f"{url.netloc}{url.path}", url, plugins)
    elif scheme in _TIERS:
        found = _load(_TIERS[scheme], url)
    elif scheme in _plugins():
        if scheme not in plugins:
            raise ConfigError(
                f"tiers: {url.shown}: the plugin {scheme!r} is installed; to let it run, "
                "add it to the setting `plugins`"
            )
        point = _plugins()[scheme]
        found = _load(_Home(point.module, point.attr), url)
    elif scheme in _ELSEWHERE:
        raise ConfigError(
            f"tiers: {url.shown}: the scheme {scheme!r} is LMCache's; here write "
            f"{_ELSEWHERE[scheme]}"
        )
    else:
        near = get_close_matches(scheme, tier_schemes(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"tiers: {url.shown}: there is no tier {scheme!r}; known are "
            f"{', '.join(tier_schemes())}{hint}"
        )
    return found


def _load_plugin(named: str, url: TierUrl, plugins: Sequence[str]) -> TierClass:
    module, colon, name = named.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f"tiers: {url.shown}: write plugin://module:Class")
    if named not in plugins:
        raise ConfigError(
            f"tiers: {url.shown}: to let this code run, add {named!r} to the setting `plugins`"
        )
    found: TierClass = _load(_Home(module, name), url)
    return found


def _load(home: _Home, url: TierUrl):  # type: ignore[no-untyped-def]  # the caller states the type
    module = _load_module(home, url.shown)
    try:
        return getattr(module, home.name)
    except AttributeError:
        raise ConfigError(f"tiers: {url.shown}: module {home.module} has no {home.name}") from None


def _load_module(home: _Home, shown: str) -> ModuleType:
    try:
        return import_module(home.module)
    except ImportError as error:
        how = f": pip install 'kvhold[{home.extra}]'" if home.extra is not None else ""
        raise ConfigError(f"tiers: {shown}: {error}{how}") from error
    except Exception as error:
        raise ConfigError(f"tiers: {shown}: {type(error).__name__}: {error}") from error


def _take(url: TierUrl, names: Mapping[str, object]) -> TierUrl:
    return TierUrl(
        url.scheme, url.netloc, url.path, {k: v for k, v in url.options.items() if k in names}
    )


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
