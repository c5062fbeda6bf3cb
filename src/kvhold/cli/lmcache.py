"""LMCache's settings, translated."""

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvhold.cli.lmcache_remote import MOONCAKE, remote_tiers
from kvhold.cli.lmcache_values import (
    Migration,
    extra_config,
    gib_bytes,
    is_on,
    number_of,
    query_of,
    size_text,
    whole_number,
)
from kvhold.core.errors import ConfigError

PREFIX = "LMCACHE_"
_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)?")

_UNKNOWN = "in docs/tiers.md and `kvhold serve --help`, if there is such a setting"
_PEERS = (
    "peers: on each host, [peers] listen and the tier peers://HOST:PORT,HOST:PORT (docs/peers.md)"
)
_PD = (
    "prefill and decode apart: the connector's kv_role, and `kvhold proxy --prefill URL --decode "
    "URL`; no ports or buffers to configure (docs/proxy.md)"
)
_API = "`kvhold control` (docs/control.md)"
_BLEND = (
    "[blend] selector, after a permit for the model (docs/blend.md); vLLM on a CPU and transformers"
)
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
    "enable_blending": _BLEND,
    "blend_recompute_ratio": _BLEND,
    "blend_min_tokens": _BLEND,
    "blend_special_str": _BLEND,
    "blend_separator": _BLEND,
    "blend_add_special_in_precomp": _BLEND,
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
    "cache_engine_internal_api_server_enabled": "[control] in_node (docs/control.md)",
    "internal_api_server_enabled": "[control] in_node (docs/control.md)",
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
    "audit_actual_remote_url": "audit+ before the scheme of a tier's URL",
    "audit_calc_checksum": "nothing: the tier audit+ always does",
    "audit_verify_checksum": "nothing: the tier audit+ always does",
    "audit_exclude_cmds": _NOTHING,
    "ping_timeout": "the option probe_timeout_s of a tier",
    "ping_interval": "the option breaker_pause_s of a tier",
    "infinistore_link_type": "the option link_type of the tier infinistore",
    "lmcache_rpc_port": _NOTHING,
    "discard_partial_chunks": "store_tails, with the opposite value",
    "skip_last_n_tokens": "skip_last_n_tokens",
}
_POLICIES = {"LRU": "lru", "LFU": "lfu", "FIFO": "fifo", "MRU": "mru"}


def advice(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        if name.startswith(PREFIX):
            here = _MEANINGS.get(name.removeprefix(PREFIX).lower(), _UNKNOWN)
            if _SETTING.fullmatch(here):
                here = f"KVHOLD_{here.replace('.', '_').upper()}"
            yield (
                f"{name} is a variable of LMCache and has no effect here; in kvhold it is {here}"
            )


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
    tiers += remote_tiers(migration, values)
    if tiers:
        migration.settings["tiers"] = tiers
    if is_on(values.get("enable_p2p")):
        _note_peers(migration, values)
    _set_api(migration, values)
    for name, value in extra_config(values).items():
        _translate_extra(migration, name, value)
    return migration


def _note(name: str) -> str:
    if name in _MEANINGS:
        return _MEANINGS[name]
    near = get_close_matches(name, _MEANINGS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"not known as a setting of LMCache{hint}"


def _set_chunk(migration: Migration, value: Any) -> None:
    migration.settings["tokens_per_chunk"] = whole_number("chunk_size", value)


def _set_ram(migration: Migration, value: Any) -> None:
    num_bytes = gib_bytes("max_local_cpu_size", value)
    if num_bytes:
        migration.settings["ram_bytes"] = size_text(num_bytes)
        migration.notes["max_local_cpu_size"] = (
            "ram_bytes. kvhold's memory is shared by all workers and engines of the host; "
            "LMCache's is of each worker"
        )


def _set_flag(name: str, setting: str) -> Callable[[Migration, Any], None]:
    def translate(migration: Migration, value: Any) -> None:
        migration.settings[setting] = is_on(value)

    translate.__name__ = f"set_{name}"
    return translate


def _set_policy(migration: Migration, value: Any) -> None:
    policy = _POLICIES.get(str(value).upper())
    if policy is None:
        raise ConfigError(f"cache_policy = {value!r}: must be one of {', '.join(_POLICIES)}")
    migration.settings["policy"] = policy


def _set_wait(migration: Migration, value: Any) -> None:
    migration.section("client")["arrival_timeout_s"] = number_of("blocking_timeout_secs", value)


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
        num_bytes = gib_bytes(size_name, values.get(size_name) or 0)
        if num_bytes:
            options.append(f"max_bytes={size_text(num_bytes)}")
        elif size_name:
            migration.notes[size_name] = "max_bytes is not set: the disk's free space is used"
        if _direct(values):
            options.append("direct=always")
        names = {"local_device": "disk", "local_disk": "disk"}
        tier_name = names.get(name, name.removesuffix("_path"))
        if tier_name != "disk":
            options.append(f"name={tier_name}")
        found.append(f"disk://{_absolute(migration, name, str(path))}{query_of(options)}")
    if old in ("cpu", "cuda") and values.get("max_local_cache_size"):
        size = gib_bytes("max_local_cache_size", values["max_local_cache_size"])
        migration.settings["ram_bytes"] = size_text(size)
    return found


def _absolute(migration: Migration, name: str, path: str) -> str:
    path = path.removeprefix("file://")
    if not path.startswith("/"):
        migration.notes[name] = f"a tier; the relative path {path!r} was made absolute"
        path = str(Path.cwd() / path)
    return quote(path.rstrip("/") or "/")


def _direct(values: Mapping[str, Any]) -> bool:
    extra = extra_config(values)
    return is_on(extra.get("use_odirect")) or is_on(extra.get("use_direct_io"))


def _set_api(migration: Migration, values: Mapping[str, Any]) -> None:
    for name in ("internal_api_server", "cache_engine_internal_api_server"):
        if is_on(values.get(f"{name}_enabled")):
            control = migration.section("control")
            control["in_node"] = True
            port = values.get(f"{name}_port_start")
            if port is not None:
                control["listen"] = f"127.0.0.1:{whole_number(f'{name}_port_start', port)}"


def _note_peers(migration: Migration, values: Mapping[str, Any]) -> None:
    if not values.get("distributed_url") or not values.get("lookup_url"):
        raise ConfigError("enable_p2p needs lookup_url and distributed_url")
    place = str(values["distributed_url"]).rpartition("://")[2]
    migration.notes["distributed_url"] = (
        f"on this host [peers] listen = {place!r}, with a token beyond loopback; on the others the "
        f"tier peers://{place}"
    )


def _translate_extra(migration: Migration, name: str, value: Any) -> None:
    meaning = _EXTRAS.get(name)
    if name in MOONCAKE:
        meaning = f"the option {MOONCAKE[name]} of the tier mooncake"
    if meaning is None and name.startswith(("audit_", "mooncake", "master_", "protocol")):
        meaning = "an option of the tier; see `kvhold tiers`"
    migration.notes[f"extra_config.{name}"] = meaning or "not known as a setting of LMCache"
    if name == "skip_last_n_tokens":
        migration.settings["skip_last_n_tokens"] = whole_number(name, value)
    elif name == "discard_partial_chunks":
        migration.settings["store_tails"] = not is_on(value)


def _parsed(text: str) -> Any:
    if text.lower() in ("none", ""):
        return None
    return text
