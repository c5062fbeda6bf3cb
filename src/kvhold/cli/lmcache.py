"""LMCache's settings, translated."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from kvhold.core.errors import ConfigError

PREFIX = "LMCACHE_"
_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)?")

_GIB = 1 << 30
_PASSWORD = "${env:KVHOLD_REMOTE_PASSWORD}"
_UNKNOWN = "in docs/tiers.md and `kvhold serve --help`, if there is such a setting"
_PEERS = (
    "peers: on each host, [peers] listen and the tier peers://HOST:PORT,HOST:PORT (docs/peers.md)"
)
_PD = (
    "prefill and decode apart: the connector's kv_role, and `kvhold proxy --prefill URL --decode "
    "URL`; no ports or buffers to configure (docs/proxy.md)"
)
_API = "`kvhold control` (docs/control.md)"
_NO_BLEND = "not here: kvhold reuses prefixes only"
_NOTHING = "nothing: it is not needed here"

_MEANINGS = {
    "chunk_size": "tokens_per_chunk",
    "local_cpu": "nothing: memory is always used (ram_bytes is its size)",
    "max_local_cpu_size": "ram_bytes, with a unit",
    "local_disk": "a tier disk:///PATH",
    "max_local_disk_size": "the option max_bytes of the tier disk",
    "remote_url": "tiers, one URL per tier",
    "remote_serde": "the option codec of a tier",
    "use_layerwise": "layerwise",
    "save_decode_cache": "save_decode",
    "save_unfull_chunk": "store_tails",
    "cache_policy": "policy",
    "blocking_timeout_secs": "client.arrival_timeout_s",
    "pre_caching_hash_algorithm": "nothing: names never depend on a process's hash seed",
    "enable_blending": _NO_BLEND,
    "blend_recompute_ratio": _NO_BLEND,
    "blend_min_tokens": _NO_BLEND,
    "blend_special_str": _NO_BLEND,
    "blend_separator": _NO_BLEND,
    "blend_add_special_in_precomp": _NO_BLEND,
    "enable_p2p": _PEERS,
    "lookup_url": "nothing: a node knows its peers' chunks itself",
    "distributed_url": "[peers] listen",
    "error_handling": "nothing: a fault is always a miss",
    "enable_controller": _API,
    "lmcache_instance_id": "nothing: a node is named by its host",
    "controller_url": _API,
    "lmcache_worker_port": _API,
    "enable_nixl": _PD,
    "nixl_role": _PD,
    "nixl_receiver_host": _PD,
    "nixl_receiver_port": _PD,
    "nixl_peer_host": _PD,
    "nixl_peer_port": _PD,
    "nixl_peer_init_port": _PD,
    "nixl_peer_alloc_port": _PD,
    "nixl_proxy_host": _PD,
    "nixl_proxy_port": _PD,
    "nixl_buffer_size": _NOTHING,
    "nixl_buffer_device": _NOTHING,
    "nixl_enable_gc": _NOTHING,
    "enable_xpyd": _PD,
    "weka_path": "a tier disk:///PATH, or fs:///PATH if hosts share it",
    "gds_path": "a tier disk:///PATH; it is read through host memory",
    "cufile_buffer_size": _NOTHING,
    "audit_actual_remote_url": "audit+ before the scheme of a tier's URL",
    "extra_config": "settings of their own",
    "external_lookup_client": "nothing: the node looks up",
    "py_enable_gc": _NOTHING,
    "cache_engine_internal_api_server_enabled": _API,
    "internal_api_server_enabled": _API,
    "cache_engine_internal_api_server_port_start": "[control] listen",
    "internal_api_server_port_start": "[control] listen",
    "local_device": "ram_bytes, or a tier disk:///PATH",
    "max_local_cache_size": "ram_bytes, or the option max_bytes of the tier disk",
    "pipelined_backend": _NOTHING,
    "config_file": "KVHOLD_CONFIG, a settings file of kvhold",
    "use_experimental": _NOTHING,
    "track_usage": "nothing: no data leaves the host",
}
_EXTRAS = {
    "save_only_first_rank": "nothing: with MLA, workers that hold the same KV share it",
    "first_rank_max_local_cpu_size": "ram_bytes, which is the host's",
    "tag_keys": "nothing: all tags of a request are part of the name",
    "use_odirect": "the option direct of the tier disk",
    "use_direct_io": "the option direct of the tier disk",
    "use_cufile": "nothing: disks are read through host memory",
    "save_chunk_meta": "nothing: a frame describes itself",
    "use_exists_sync": _NOTHING,
    "remote_enable_mla_worker_id_as0": "nothing: with MLA, workers that hold the same KV share it",
    "create_lookup_server_only_on_worker_0_for_mla": _NOTHING,
    "ping_timeout": "the option probe_timeout_s of a tier",
    "ping_interval": "the option breaker_pause_s of a tier",
    "infinistore_link_type": "the option link_type of the tier infinistore",
    "lmcache_rpc_port": _NOTHING,
    "discard_partial_chunks": "store_tails, with the opposite value",
    "skip_last_n_tokens": "skip_last_n_tokens",
}
_MOONCAKE = {
    "metadata_server": "metadata",
    "protocol": "protocol",
    "device_name": "device",
    "local_hostname": "hostname",
    "global_segment_size": "segment_bytes",
    "local_buffer_size": "buffer_bytes",
}
_POLICIES = {"LRU": "lru", "LFU": "lfu", "FIFO": "fifo", "MRU": "mru"}
_CODECS = {"naive": "", "torch": "", "safetensor": "", "fast": ""} | {
    name: name for name in ("cachegen", "kivi")
}


def advice(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        if name.startswith(PREFIX):
            here = _MEANINGS.get(name.removeprefix(PREFIX).lower(), _UNKNOWN)
            if _SETTING.fullmatch(here):
                here = f"KVHOLD_{here.replace('.', '_').upper()}"
            yield (
                f"{name} is a variable of LMCache and has no effect here; in kvhold it is {here}"
            )


@dataclass
class Migration:
    """settings: kvhold's, as in a settings file
    notes:    a sentence for each of LMCache's settings, by its name
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def section(self, name: str) -> dict[str, Any]:
        section: dict[str, Any] = self.settings.setdefault(name, {})
        return section

    def as_toml(self) -> str:
        """Return a settings file, with the notes as comments."""
        lines = [f"# {_plain(name)}: {_plain(text)}" for name, text in self.notes.items()]
        lines += ["", *_toml_lines(self.settings)]
        for name, section in self.settings.items():
            if isinstance(section, dict):
                lines += ["", f"[{name}]", *_toml_lines(section)]
        return "\n".join(lines).strip() + "\n"


def values_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that LMCache would read from the environment."""
    return {
        name.removeprefix(PREFIX).lower(): _parsed(text)
        for name, text in sorted(environ.items())
        if name.startswith(PREFIX) and name != f"{PREFIX}CONFIG_FILE"
    }


def migrate(values: Mapping[str, Any]) -> Migration:
    """Translate LMCache's settings. Raises ConfigError for a value that LMCache refuses, too."""
    migration = Migration()
    tiers: list[str] = []
    for name in values:
        migration.notes[name] = _note(name)
    for name, translate in _TRANSLATIONS.items():
        if name in values and values[name] is not None:
            translate(migration, values[name])
    tiers += _disk_tiers(migration, values)
    tiers += _remote_tiers(migration, values)
    if tiers:
        migration.settings["tiers"] = tiers
    if _is_on(values.get("enable_p2p")):
        _note_peers(migration, values)
    for name, value in _extra(values).items():
        _translate_extra(migration, name, value)
    return migration


def _note(name: str) -> str:
    if name in _MEANINGS:
        return _MEANINGS[name]
    near = get_close_matches(name, _MEANINGS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"not known as a setting of LMCache{hint}"


def _set_chunk(migration: Migration, value: Any) -> None:
    migration.settings["tokens_per_chunk"] = _whole("chunk_size", value)


def _set_ram(migration: Migration, value: Any) -> None:
    num_bytes = _gib_bytes("max_local_cpu_size", value)
    if num_bytes:
        migration.settings["ram_bytes"] = _size(num_bytes)
        migration.notes["max_local_cpu_size"] = (
            "ram_bytes. kvhold's memory is shared by all workers and engines of the host; "
            "LMCache's is of each worker"
        )


def _set_flag(name: str, setting: str) -> Callable[[Migration, Any], None]:
    def translate(migration: Migration, value: Any) -> None:
        migration.settings[setting] = _is_on(value)

    translate.__name__ = f"set_{name}"
    return translate


def _set_policy(migration: Migration, value: Any) -> None:
    policy = _POLICIES.get(str(value).upper())
    if policy is None:
        raise ConfigError(f"cache_policy = {value!r}: must be one of {', '.join(_POLICIES)}")
    migration.settings["policy"] = policy


def _set_wait(migration: Migration, value: Any) -> None:
    migration.section("client")["arrival_timeout_s"] = _number("blocking_timeout_secs", value)


def _set_old_device(migration: Migration, value: Any) -> None:
    if value not in ("cpu", "cuda") and not str(value).startswith("file://"):
        raise ConfigError(f"local_device = {value!r}: must be cpu, cuda or file:///PATH")


_TRANSLATIONS: dict[str, Callable[[Migration, Any], None]] = {
    "chunk_size": _set_chunk,
    "max_local_cpu_size": _set_ram,
    "use_layerwise": _set_flag("use_layerwise", "layerwise"),
    "save_decode_cache": _set_flag("save_decode_cache", "save_decode"),
    "save_unfull_chunk": _set_flag("save_unfull_chunk", "store_tails"),
    "cache_policy": _set_policy,
    "blocking_timeout_secs": _set_wait,
    "local_device": _set_old_device,
}


def _disk_tiers(migration: Migration, values: Mapping[str, Any]) -> list[str]:
    found = []
    old = str(values.get("local_device") or "")
    for name, path, size_name in (
        ("local_disk", values.get("local_disk"), "max_local_disk_size"),
        ("local_device", old if old.startswith("file://") else None, "max_local_cache_size"),
        ("weka_path", values.get("weka_path"), ""),
        ("gds_path", values.get("gds_path"), ""),
    ):
        if not path:
            continue
        options = []
        num_bytes = _gib_bytes(size_name, values.get(size_name) or 0)
        if num_bytes:
            options.append(f"max_bytes={_size(num_bytes)}")
        elif size_name:
            migration.notes[size_name] = "max_bytes is not set: the disk's free space is used"
        if _direct(values):
            options.append("direct=always")
        names = {"local_device": "disk", "local_disk": "disk"}
        tier_name = names.get(name, name.removesuffix("_path"))
        if tier_name != "disk":
            options.append(f"name={tier_name}")
        found.append(f"disk://{_absolute(migration, name, str(path))}{_query(options)}")
    if old in ("cpu", "cuda") and values.get("max_local_cache_size"):
        size = _gib_bytes("max_local_cache_size", values["max_local_cache_size"])
        migration.settings["ram_bytes"] = _size(size)
    return found


def _absolute(migration: Migration, name: str, path: str) -> str:
    path = path.removeprefix("file://")
    if not path.startswith("/"):
        migration.notes[name] = f"a tier; the relative path {path!r} was made absolute"
        path = str(Path.cwd() / path)
    return quote(path.rstrip("/") or "/")


def _direct(values: Mapping[str, Any]) -> bool:
    extra = _extra(values)
    return _is_on(extra.get("use_odirect")) or _is_on(extra.get("use_direct_io"))


def _remote_tiers(migration: Migration, values: Mapping[str, Any]) -> list[str]:
    text = values.get("remote_url")
    if not text:
        return []
    if "://" not in str(text):
        raise ConfigError(f"remote_url = {text!r}: must be SCHEME://HOST:PORT")
    scheme, _, rest = str(text).partition("://")
    if scheme == "audit":
        inner = values.get("audit_actual_remote_url")
        return [f"audit+{url}" for url in _remote_tiers(migration, {**values, "remote_url": inner})]
    options = []
    codec = _codec_of(migration, values)
    if codec:
        options.append(f"codec={codec}")
    options += _client_options(migration, scheme, rest, _extra(values))
    url = _remote_url(migration, scheme, rest)
    return [] if url is None else [_with_query(url, options)]


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
    if scheme in ("redis", "rediss", "unix"):
        return f"{scheme}://{place}"
    if scheme == "redis-sentinel":
        return f"{scheme}://{place}?service=mymaster"
    if scheme == "lm":
        migration.notes["remote_url"] = (
            "a tier; start the central cache with `kvhold serve --listen HOST:PORT`"
        )
        return f"kvhold://{place}"
    if scheme == "infinistore":
        return f"infinistore://{place}"
    if scheme == "mooncakestore":
        return f"mooncake://{place}"
    if scheme == "fs":
        path = urlsplit(f"fs://{place}").path
        return f"fs://{path}"
    if scheme == "blackhole":
        return "null://"
    if scheme == "external":
        migration.notes["remote_url"] = (
            f"not translated: the tier {rest!r} must be written for kvhold: "
            "plugin://module:Class (CONTRIBUTING.md)"
        )
        return None
    migration.notes["remote_url"] = f"not translated: kvhold has no tier {scheme!r}"
    if query:
        migration.notes["remote_url"] += f", and {query!r} is not read"
    return None


def _client_options(
    migration: Migration, scheme: str, rest: str, extra: Mapping[str, Any]
) -> list[str]:
    if scheme == "infinistore":
        device = parse_qs(rest.partition("?")[2]).get("device", [])
        link = extra.get("infinistore_link_type")
        found = {"device": device[0] if device else None, "link_type": link}
    elif scheme == "mooncakestore":
        migration.notes["remote_url"] = (
            "a tier; allow_all_interfaces=true: as with LMCache, Mooncake's client listens on all "
            "interfaces without authentication"
        )
        found = {option: extra.get(name) for name, option in _MOONCAKE.items()}
        found["allow_all_interfaces"] = "true"
    else:
        return []
    return [f"{name}={quote(str(value), safe=':,')}" for name, value in found.items() if value]


def _without_password(migration: Migration, place: str) -> str:
    credentials, at, hosts = place.rpartition("@")
    if not at or not credentials.partition(":")[2]:
        return place
    migration.notes["remote_url"] = "a tier; set KVHOLD_REMOTE_PASSWORD to its password"
    return f"{credentials.partition(':')[0]}:{_PASSWORD}@{hosts}"


def _note_peers(migration: Migration, values: Mapping[str, Any]) -> None:
    if not values.get("distributed_url") or not values.get("lookup_url"):
        raise ConfigError("enable_p2p needs lookup_url and distributed_url")
    place = str(values["distributed_url"]).rpartition("://")[2]
    migration.notes["distributed_url"] = (
        f"on this host [peers] listen = {place!r}, with a token beyond loopback; on the others the "
        f"tier peers://{place}"
    )


def _extra(values: Mapping[str, Any]) -> dict[str, Any]:
    extra = values.get("extra_config") or {}
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError as error:
            raise ConfigError(f"extra_config is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"extra_config must hold names and values, not a {type(extra).__name__}")
    return extra


def _translate_extra(migration: Migration, name: str, value: Any) -> None:
    meaning = _EXTRAS.get(name)
    if name in _MOONCAKE:
        meaning = f"the option {_MOONCAKE[name]} of the tier mooncake"
    if meaning is None and name.startswith(("audit_", "mooncake", "master_", "protocol")):
        meaning = "an option of the tier; see `kvhold tiers`"
    migration.notes[f"extra_config.{name}"] = meaning or "not known as a setting of LMCache"
    if name == "skip_last_n_tokens":
        migration.settings["skip_last_n_tokens"] = _whole(name, value)
    elif name == "discard_partial_chunks":
        migration.settings["store_tails"] = not _is_on(value)


def _parsed(text: str) -> Any:
    if text.lower() in ("none", ""):
        return None
    return text


def _is_on(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < 1 << 40:
        raise ConfigError(f"{name} = {value!r}: must be a number of 0 or more")
    return number


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if number != int(number):
        raise ConfigError(f"{name} = {value!r}: must be a whole number")
    return int(number)


def _gib_bytes(name: str, value: Any) -> int:
    return int(_number(name, value) * _GIB)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def _query(options: list[str]) -> str:
    return "?" + "&".join(options) if options else ""


def _with_query(url: str, options: list[str]) -> str:
    return url + (_query(options).replace("?", "&") if "?" in url else _query(options))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _toml_lines(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {json.dumps(value)}"
        for name, value in values.items()
        if not isinstance(value, dict)
    ]
