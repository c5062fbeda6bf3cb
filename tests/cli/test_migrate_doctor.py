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
    service = "mymaster"  # LMCache's


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


def test_each_setting_of_lmcache_is_in_a_configuration() -> None:
    shown = {name for before, _ in CONFIGURATIONS.values() for name in before}
    assert lmcache._MEANINGS.keys() - shown == set()
    extras = {
        name
        for before, _ in CONFIGURATIONS.values()
        for name in dict(before.get("extra_config") or {})
    }
    assert lmcache._EXTRAS.keys() - extras == set()
