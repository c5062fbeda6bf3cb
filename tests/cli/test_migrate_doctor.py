"""`kvhold doctor` accepts what `kvhold migrate` makes of each kind of LMCache's configuration, with
real stores where the configuration names one.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvhold.cli import lmcache
from kvhold.cli.doctor import command as doctor
from kvhold.cli.migrate import command as migrate
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.central import CentralServer
from kvhold_lab.servers.mooncake import MooncakeMaster
from kvhold_lab.servers.redis import RedisSentinels, RedisServer
from tests.cli.test_migrate import CONFIGURATIONS

pytestmark = pytest.mark.server

# its server needs an RDMA device
WITHOUT_SERVER = "infinistore"
# a tier that keeps nothing is said to
KEEPS_NOTHING = {"nowhere": "a probe finds nothing"}
FOLDERS = ("local_disk", "weka_path", "gds_path", "local_device")


class Sentinels(RedisSentinels):
    service = "redismaster"  # LMCache's


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """Real servers by the places in the configurations."""
    with ExitStack() as stack:
        try:
            redis = stack.enter_context(RedisServer())
            sentinels = stack.enter_context(Sentinels())
            central = stack.enter_context(CentralServer())
            mooncake = stack.enter_context(MooncakeMaster())
        except NotInstalled as error:
            pytest.skip(str(error))
        watched = ",".join(f"127.0.0.1:{one.port}" for one in sentinels.sentinels)
        yield {
            "redis://h:6379": f"redis://127.0.0.1:{redis.port}",
            "redis://h:6379/2?health_check_interval=5": f"redis://127.0.0.1:{redis.port}/2",
            "redis://h:1": f"redis://127.0.0.1:{redis.port}",
            "redis-sentinel://a:26379,b:26379": f"redis-sentinel://{watched}",
            "mooncakestore://h:50051/": f"mooncakestore://127.0.0.1:{mooncake.port}/",
            "lm://h:65432": central.url.replace("kvhold", "lm"),
        }


def settled(before: dict[str, Any], places: dict[str, str], folder: Path) -> dict[str, Any]:
    """The same configuration with real servers and folders."""
    values = dict(before)
    for name in ("remote_url", "audit_actual_remote_url"):
        if name in values:
            values[name] = places.get(values[name], values[name])
    if name in (extra := values.get("extra_config") or {}):
        values["extra_config"] = extra | {name: places[extra[name]]}
    if str(values.get("remote_url", "")).startswith("fs://"):
        values["remote_url"] = f"fs://h:0{folder}/shared"
    for name in FOLDERS:
        if values.get(name) not in (None, "cpu", "cuda"):
            values[name] = ("file://" if name == "local_device" else "") + f"{folder}/{name}"
    return values


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_doctor_accepts_what_migrate_writes(
    name: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHOLD_NODE_SOCKET", str(tmp_path / "node.sock"))
    old, new = tmp_path / "lmcache.yaml", tmp_path / "kvhold.toml"
    old.write_text(yaml.safe_dump(settled(CONFIGURATIONS[name][0], places, tmp_path)))
    runner = CliRunner()
    done = runner.invoke(migrate, [str(old), "--output", str(new)])
    assert done.exit_code == 0, done.exception
    done = runner.invoke(doctor, ["--config", str(new)])
    if name == WITHOUT_SERVER:
        assert "connect" in done.stdout or "pip install" in done.stdout, done.stdout
        return
    if name in KEEPS_NOTHING:
        assert KEEPS_NOTHING[name] in done.stdout
        return
    assert done.exit_code == 0, (new.read_text(), done.stdout, done.exception)
    assert "WRONG" not in done.stdout


# of LMCache's configuration, its first version, and its extra_config
SETTINGS = """chunk_size local_cpu max_local_cpu_size local_disk max_local_disk_size remote_url
    remote_serde use_layerwise save_decode_cache pre_caching_hash_algorithm enable_blending
    blend_recompute_ratio blend_min_tokens blend_special_str enable_p2p lookup_url distributed_url
    error_handling enable_controller lmcache_instance_id controller_url lmcache_worker_port
    enable_nixl nixl_role nixl_receiver_host nixl_receiver_port nixl_buffer_size nixl_buffer_device
    nixl_enable_gc enable_xpyd nixl_peer_host nixl_peer_port nixl_peer_init_port
    nixl_peer_alloc_port nixl_proxy_host nixl_proxy_port weka_path gds_path cufile_buffer_size
    audit_actual_remote_url extra_config save_unfull_chunk blocking_timeout_secs
    external_lookup_client py_enable_gc cache_policy cache_engine_internal_api_server_enabled
    cache_engine_internal_api_server_port_start local_device max_local_cache_size
    pipelined_backend blend_separator blend_add_special_in_precomp"""
EXTRAS = """save_only_first_rank first_rank_max_local_cpu_size tag_keys use_odirect use_cufile
    use_direct_io save_chunk_meta use_exists_sync remote_enable_mla_worker_id_as0
    create_lookup_server_only_on_worker_0_for_mla ping_timeout ping_interval infinistore_link_type
    audit_actual_remote_url audit_calc_checksum audit_verify_checksum audit_exclude_cmds
    lmcache_rpc_port discard_partial_chunks skip_last_n_tokens"""


def test_each_setting_of_lmcache_is_in_a_configuration() -> None:
    assert set(SETTINGS.split()) - lmcache._MEANINGS.keys() == set()
    assert set(EXTRAS.split()) - lmcache._EXTRAS.keys() == set()
    shown = {name for before, _ in CONFIGURATIONS.values() for name in before}
    assert lmcache._MEANINGS.keys() - shown == set()
    extras = {
        name
        for before, _ in CONFIGURATIONS.values()
        for name in dict(before.get("extra_config") or {})
    }
    assert lmcache._EXTRAS.keys() - extras == set()
