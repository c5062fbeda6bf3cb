"""`kvhold migrate`: each kind of LMCache's configuration becomes settings that kvhold accepts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from kvhold.cli import lmcache
from kvhold.cli.migrate import command
from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError
from kvhold.tiers.registry import make_tier

CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "memory": (
        {"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 5},
        {"tokens_per_chunk": 256, "ram_bytes": 5 << 30},
    ),
    "a part of a gigabyte": ({"max_local_cpu_size": 0.5}, {"ram_bytes": 512 << 20}),
    "disk": (
        {"local_disk": "file:///data/lm cache/", "max_local_disk_size": 5.0},
        {"tiers": ("disk:///data/lm%20cache?max_bytes=5GiB",)},
    ),
    "disk without a size": ({"local_disk": "/data"}, {"tiers": ("disk:///data",)}),
    "disk past the page cache": (
        {"local_disk": "/data", "extra_config": {"use_odirect": True}},
        {"tiers": ("disk:///data?direct=always",)},
    ),
    "redis": ({"remote_url": "redis://h:6379"}, {"tiers": ("redis://h:6379",)}),
    "sentinels": (
        {"remote_url": "redis-sentinel://a:26379,b:26379"},
        {"tiers": ("redis-sentinel://a:26379,b:26379?service=redismaster",)},
    ),
    "a server of its own": ({"remote_url": "lm://h:65432"}, {"tiers": ("kvhold://h:65432",)}),
    "mooncake": (
        {
            "remote_url": "mooncakestore://h:50051/",
            "extra_config": {
                "master_server_address": "h",
                "global_segment_size": 256 << 20,
            },
        },
        {
            "tiers": ("mooncake://h:50051/?segment_bytes=268435456&allow_all_interfaces=true",)
        },
    ),
    "infinistore": (
        {"remote_url": "infinistore://h:12345/?device=mlx5_1"},
        {"tiers": ("infinistore://h:12345/?device=mlx5_1",)},
    ),
    "redis by name": (
        {"remote_url": "redis://h:6379/2?health_check_interval=5"}, {"tiers": ("redis://h:6379/2",)}
    ),
    "shared files in two folders": (
        {"remote_url": "fs://h:0/mnt/a,/mnt/b"}, {"tiers": ("fs:///mnt/a",)}
    ),
    "audited, named as an extra": (
        {
            "remote_url": "audit://h:1?verify=true",
            "extra_config": {
                "audit_actual_remote_url": "redis://h:6379",
                "audit_calc_checksum": True,
                "audit_verify_checksum": True,
                "audit_exclude_cmds": ["get"],
            },
        },
        {"tiers": ("audit+redis://h:6379",)},
    ),
    "shared files": ({"remote_url": "fs://h:0/mnt/kv"}, {"tiers": ("fs:///mnt/kv",)}),
    "nowhere": ({"remote_url": "blackhole://h:1"}, {"tiers": ("null://",)}),
    "a plugin": ({"remote_url": "external://h:0/a.b/?connector_name=C"}, {}),
    "audited": (
        {"remote_url": "audit://h:1", "audit_actual_remote_url": "redis://h:6379"},
        {"tiers": ("audit+redis://h:6379",)},
    ),
    "cachegen": (
        {"remote_url": "redis://h:6379", "remote_serde": "cachegen"},
        {"tiers": ("redis://h:6379?codec=cachegen",)},
    ),
    "disk and redis": (
        {"local_disk": "/d", "max_local_disk_size": 1, "remote_url": "redis://h:1"},
        {"tiers": ("disk:///d?max_bytes=1GiB", "redis://h:1")},
    ),
    "weka": ({"weka_path": "/mnt/weka"}, {"tiers": ("disk:///mnt/weka?name=weka",)}),
    "gds": ({"gds_path": "/mnt/gds", "cufile_buffer_size": 8192},
            {"tiers": ("disk:///mnt/gds?name=gds",)}),
    "layers": ({"use_layerwise": True, "save_unfull_chunk": False},
               {"layerwise": True, "store_tails": False}),
    "decoded": ({"save_decode_cache": True}, {"save_decode": True}),
    "policy": ({"cache_policy": "LFU"}, {"policy": "lfu"}),
    "blend": ({"enable_blending": True, "blend_special_str": " # # "}, {}),
    "peers": (
        {"enable_p2p": True, "lookup_url": "redis://h:6379", "distributed_url": "10.0.0.1:8200"},
        {},
    ),
    "controller": (
        {
            "enable_controller": True,
            "lmcache_instance_id": "one",
            "controller_url": "localhost:9001",
            "lmcache_worker_port": 8001,
        },
        {},
    ),
    "prefill": (
        {
            "enable_nixl": True,
            "enable_xpyd": True,
            "nixl_role": "sender",
            "nixl_proxy_host": "h",
            "nixl_proxy_port": 7500,
            "nixl_buffer_size": 1 << 30,
            "nixl_buffer_device": "cuda",
        },
        {},
    ),
    "internal api": (
        {
            "cache_engine_internal_api_server_enabled": True,
            "cache_engine_internal_api_server_port_start": 7000,
        },
        {"control": {"in_node": True, "listen": "127.0.0.1:7000"}},
    ),
    "last tokens": ({"extra_config": {"skip_last_n_tokens": 1}}, {"skip_last_n_tokens": 1}),
    "partial chunks": ({"extra_config": {"discard_partial_chunks": True}}, {"store_tails": False}),
    "decode": (
        {
            "local_cpu": False,
            "enable_nixl": True,
            "nixl_role": "receiver",
            "nixl_receiver_host": "localhost",
            "nixl_receiver_port": 5555,
            "nixl_peer_host": "localhost",
            "nixl_peer_port": 5555,
            "nixl_peer_init_port": [7300],
            "nixl_peer_alloc_port": [7400],
            "nixl_buffer_size": 1 << 30,
            "nixl_buffer_device": "cuda",
            "nixl_enable_gc": True,
        },
        {},
    ),
    "a lookup server": (
        {
            "external_lookup_client": "mooncakestore://h:50051",
            "pre_caching_hash_algorithm": "sha256",
            "blocking_timeout_secs": 10,
            "error_handling": True,
            "py_enable_gc": False,
            "internal_api_server_enabled": True,
            "internal_api_server_port_start": 7000,
        },
        {"control": {"in_node": True, "listen": "127.0.0.1:7000"}},
    ),
    "blend of the first version": (
        {
            "local_device": "cuda",
            "enable_blending": True,
            "blend_recompute_ratio": 0.15,
            "blend_min_tokens": 256,
            "blend_separator": "[BLEND_SEP]",
            "blend_add_special_in_precomp": False,
        },
        {},
    ),
    "one name for all workers": (
        {
            "use_experimental": True,
            "track_usage": False,
            "config_file": None,
            "extra_config": {
                "save_only_first_rank": True,
                "first_rank_max_local_cpu_size": 5,
                "tag_keys": ["a"],
                "use_cufile": True,
                "use_direct_io": False,
                "save_chunk_meta": False,
                "use_exists_sync": True,
                "remote_enable_mla_worker_id_as0": True,
                "create_lookup_server_only_on_worker_0_for_mla": True,
                "ping_timeout": 10,
                "ping_interval": 30,
                "infinistore_link_type": "Ethernet",
                "lmcache_rpc_port": "one",
            },
        },
        {},
    ),
    "the first version": (
        {"local_device": "file:///d/", "max_local_cache_size": 20, "pipelined_backend": True},
        {"tiers": ("disk:///d?max_bytes=20GiB",)},
    ),
    "the first version in memory": (
        {"local_device": "cpu", "max_local_cache_size": 5},
        {"ram_bytes": 5 << 30},
    ),
}  # fmt: skip


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(command, list(arguments))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_kind_becomes_settings_that_are_accepted(name: str, tmp_path: Path) -> None:
    before, expected = CONFIGURATIONS[name]
    old, new = tmp_path / "lmcache.yaml", tmp_path / "kvhold.toml"
    old.write_text(yaml.safe_dump(before))
    done = run(str(old), "--output", str(new))
    assert done.exit_code == 0, done.exception
    config = load_config(file=new)
    for setting, value in expected.items():
        found = getattr(config, setting)
        if isinstance(value, dict):
            found = {name: getattr(found, name) for name in value}
        assert found == value
    if "tiers" not in expected:
        assert config.tiers == Config().tiers
    for url in config.tiers:
        if not url.startswith(("mooncake", "infinistore")):  # they connect at once
            make_tier(url)
    said = new.read_text()
    for setting in before:
        assert f"# {setting}: " in said
    assert "not known" not in said


def test_an_allowed_loss_is_said_and_set() -> None:
    migration = lmcache.migrate({"remote_url": "redis://h:1", "remote_serde": "cachegen"})
    assert migration.settings["rules"] == {"max_error": 1.0}
    assert "changes KV" in migration.notes["remote_serde"]


def test_what_is_lost_is_said() -> None:
    notes = [
        lmcache.migrate({"remote_url": url}).notes["remote_url"]
        for url in ("redis://u:p@h:1?socket_timeout=1", "fs://h:0/a,/b")
    ]
    assert "KVHOLD_REMOTE_PASSWORD" in notes[0] and "'socket_timeout=1'" in notes[0]
    assert "/b are not used" in notes[1]


def test_the_sentinels_service_is_that_of_lmcaches_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDIS_SERVICE_NAME", "mymaster")
    migration = lmcache.migrate({"remote_url": "redis-sentinel://h:1"})
    assert migration.settings["tiers"] == ["redis-sentinel://h:1?service=mymaster"]


def test_a_password_is_not_in_the_file() -> None:
    text = lmcache.migrate({"remote_url": "redis://user:s3cret@h:1"}).as_toml()
    assert "s3cret" not in text
    assert "redis://user:${env:KVHOLD_REMOTE_PASSWORD}@h:1" in text


def test_the_environment_is_read_as_lmcache_reads_it(tmp_path: Path) -> None:
    done = run(
        "--json",
        LMCACHE_CHUNK_SIZE="256",
        LMCACHE_LOCAL_CPU="True",
        LMCACHE_REMOTE_URL="None",
        LMCACHE_EXTRA_CONFIG='{"skip_last_n_tokens": 2}',
    )
    found = json.loads(done.stdout)
    assert found["settings"] == {"tokens_per_chunk": 256, "skip_last_n_tokens": 2}
    assert found["notes"].keys() >= {"chunk_size", "local_cpu", "remote_url"}
    old = tmp_path / "old.yaml"
    old.write_text("chunk_size: 64\n")
    done = run("--json", LMCACHE_CONFIG_FILE=str(old), LMCACHE_CHUNK_SIZE="256")
    assert json.loads(done.stdout)["settings"] == {"tokens_per_chunk": 64}, "the file wins"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"chunk_size": "many"}, "chunk_size = 'many'"),
        ({"chunk_size": 1.5}, "whole number"),
        ({"max_local_cpu_size": -1}, "max_local_cpu_size = -1"),
        ({"max_local_cpu_size": float("nan")}, "max_local_cpu_size"),
        ({"cache_policy": "ARC"}, "LRU, LFU, FIFO, MRU"),
        ({"remote_url": "h:6379"}, "SCHEME://HOST:PORT"),
        ({"remote_url": "redis://h:1", "remote_serde": "zip"}, "remote_serde = 'zip'"),
        ({"remote_url": "audit://h:1"}, "audit_actual_remote_url is missing"),
        ({"enable_p2p": True}, "lookup_url and distributed_url"),
        ({"extra_config": "{"}, "not JSON"),
        ({"extra_config": []}, "names and values"),
        ({"local_device": "tpu"}, "local_device = 'tpu'"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], told: str) -> None:
    if values.get("extra_config") == []:
        values = {"extra_config": [1]}
    with pytest.raises(ConfigError) as caught:
        lmcache.migrate(values)
    assert told in str(caught.value)


def test_an_unknown_name_is_said_and_nothing_is_overwritten(tmp_path: Path) -> None:
    assert "did you mean chunk_size?" in lmcache.migrate({"chunk_sizes": 1}).notes["chunk_sizes"]
    new = tmp_path / "kvhold.toml"
    new.write_text("kept")
    done = run("--output", str(new), LMCACHE_CHUNK_SIZE="1")
    assert isinstance(done.exception, ConfigError) and "cannot write" in str(done.exception)
    assert new.read_text() == "kept"


def test_without_anything_to_translate_it_says_what_to_give() -> None:
    done = run(LMCACHE_CONFIG_FILE="")
    assert isinstance(done.exception, ConfigError)
