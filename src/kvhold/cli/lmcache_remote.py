"""LMCache's remote backends, as URLs of tiers."""

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from kvhold.cli.lmcache_values import Migration, extra_config, with_query
from kvhold.core.errors import ConfigError

MOONCAKE = {
    "metadata_server": "metadata",
    "protocol": "protocol",
    "device_name": "device",
    "local_hostname": "hostname",
    "global_segment_size": "segment_bytes",
    "local_buffer_size": "buffer_bytes",
}
_PASSWORD = "${env:KVHOLD_REMOTE_PASSWORD}"
_SERVICE = "redismaster"  # LMCache's default
_REDIS = ("redis", "rediss", "unix", "redis-sentinel")
_CODECS = {"naive": "", "torch": "", "safetensor": "", "fast": ""} | {
    name: name for name in ("cachegen", "kivi")
}


def remote_tiers(migration: Migration, values: Mapping[str, Any]) -> list[str]:
    text = values.get("remote_url")
    if not text:
        return []
    if "://" not in str(text):
        raise ConfigError(f"remote_url = {text!r}: must be SCHEME://HOST:PORT")
    scheme, _, rest = str(text).partition("://")
    if scheme == "audit":
        name = "audit_actual_remote_url"
        inner = extra_config(values).get(name) or values.get(name)
        if not inner:
            raise ConfigError(f"{name} is missing; with audit:// it is the URL of the real backend")
        return [f"audit+{url}" for url in remote_tiers(migration, {**values, "remote_url": inner})]
    options = []
    codec = _codec_of(migration, values)
    if codec:
        options.append(f"codec={codec}")
    options += _client_options(migration, scheme, rest, extra_config(values))
    url = _remote_url(migration, scheme, rest)
    return [] if url is None else [with_query(url, options)]


def _codec_of(migration: Migration, values: Mapping[str, Any]) -> str:
    serde = str(values.get("remote_serde") or "naive")
    if serde not in _CODECS:
        raise ConfigError(f"remote_serde = {serde!r}: must be one of {', '.join(_CODECS)}")
    if _CODECS[serde]:
        migration.section("rules")["max_error"] = 1.0
        migration.notes["remote_serde"] = (
            f"the option codec={_CODECS[serde]}, and rules.max_error = 1.0, because the codec "
            "changes KV; remove both to have exact KV"
        )
    return _CODECS[serde]


def _remote_url(migration: Migration, scheme: str, rest: str) -> str | None:
    place, _, query = rest.partition("?")
    place = _without_password(migration, place)
    if scheme in _REDIS:
        if query:
            _note(migration, f"these options are not translated: {query!r} (see `kvhold tiers`)")
        service = ""
        if scheme == "redis-sentinel":
            service = f"?service={quote(os.environ.get('REDIS_SERVICE_NAME', _SERVICE), safe='')}"
        return f"{scheme}://{place}{service}"
    if scheme == "lm":
        _note(migration, "a tier; start the central cache with `kvhold serve --listen HOST:PORT`")
        return f"kvhold://{place}"
    if scheme == "infinistore":
        return f"infinistore://{place}"
    if scheme == "mooncakestore":
        return f"mooncake://{place}"
    if scheme == "fs":
        path, *others = urlsplit(f"fs://{place}").path.split(",")
        if others:
            _note(
                migration,
                f"a tier with the first folder; {', '.join(others)} are not used, because each "
                "tier gets every chunk",
            )
        return f"fs://{path}"
    if scheme == "blackhole":
        return "null://"
    if scheme == "external":
        _note(
            migration,
            f"not translated: the tier {rest!r} must be written for kvhold: "
            "plugin://module:Class (CONTRIBUTING.md)",
        )
        return None
    more = f", and {query!r} is not read" if query else ""
    _note(migration, f"not translated: kvhold has no tier {scheme!r}{more}")
    return None


def _client_options(
    migration: Migration, scheme: str, rest: str, extra: Mapping[str, Any]
) -> list[str]:
    if scheme == "infinistore":
        device = parse_qs(rest.partition("?")[2]).get("device", [])
        link = extra.get("infinistore_link_type")
        found = {"device": device[0] if device else None, "link_type": link}
    elif scheme == "mooncakestore":
        _note(
            migration,
            "a tier; allow_all_interfaces=true: as with LMCache, Mooncake's client listens on all "
            "interfaces without authentication",
        )
        found = {option: extra.get(name) for name, option in MOONCAKE.items()}
        found["allow_all_interfaces"] = "true"
    else:
        return []
    return [f"{name}={quote(str(value), safe=':,')}" for name, value in found.items() if value]


def _without_password(migration: Migration, place: str) -> str:
    credentials, at, hosts = place.rpartition("@")
    if not at or not credentials.partition(":")[2]:
        return place
    _note(migration, "a tier; set KVHOLD_REMOTE_PASSWORD to its password")
    return f"{credentials.partition(':')[0]}:{_PASSWORD}@{hosts}"


def _note(migration: Migration, text: str) -> None:
    before = migration.notes.get("remote_url", "")
    # the general note of this setting gives way
    migration.notes["remote_url"] = f"{before}; {text}" if before.startswith("a tier;") else text
