"""The compose files: accepted by a reader of the specification, true to the settings, and their
containers work together as processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvhold import __version__
from kvhold.core.config import load_config
from kvhold_lab.servers.base import free_port
from tests.deploy.containers import Container, Place
from tests.node.nodes import eventually
from tests.programs import needed_package, needed_program

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose"
FILES = sorted(COMPOSE.glob("*.yaml"))
ENGINES = sorted(COMPOSE.glob("engine-*.yaml"))
SETTINGS = (COMPOSE / "kvhold.toml").read_text()


def services(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Source by path in the container."""
    return {path: source for source, path, *_ in (one.split(":") for one in service["volumes"])}


BASE = services(COMPOSE / "compose.yaml")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_one_of_the_compose_specification(file: Path) -> None:
    compose_spec = needed_package("compose_spec")
    compose = compose_spec.PyCompose.from_yaml(file.read_text())
    compose.validate()
    assert compose.service_names() == list(services(file))


def test_the_specification_refuses_what_is_none() -> None:
    compose_spec = needed_package("compose_spec")
    with pytest.raises(Exception, match="imagge"):
        compose_spec.PyCompose.from_yaml("services: {a: {imagge: b}}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_containers_have_no_rights_and_known_images(file: Path) -> None:
    stages = re.findall(r" AS (\S+)", (DEPLOY / "docker/Dockerfile").read_text())
    for name, service in services(file).items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name
        if service["image"].startswith("kvhold"):
            assert f":{__version__}" in service["image"], name
        if "build" in service:
            assert service["build"]["target"] in stages
            assert (COMPOSE / service["build"]["context"] / "pyproject.toml").is_file()
            assert (COMPOSE / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_node_control_and_engines_share_the_socket() -> None:
    config = load_config(file=COMPOSE / "kvhold.toml", environ={})
    folder = str(Path(config.node.socket).parent)
    assert str(Path(config.control.socket).parent) == folder
    shared = [BASE["node"], BASE["control"], *(services(file)["engine"] for file in ENGINES)]
    assert len(shared) == 4
    assert {mounts(service)[folder] for service in shared} == {"socket"}
    dockerfile = (DEPLOY / "docker/Dockerfile").read_text()
    assert dockerfile.count(f"KVHOLD_NODE_SOCKET={config.node.socket}") == 3


def test_all_that_lasts_is_in_a_volume_or_is_mounted() -> None:
    config = load_config(file=COMPOSE / "kvhold.toml", environ={})
    (tier,) = config.tiers
    lasting = [config.clears_file, config.control.history_file, tier.split("://")[1]]
    for name in ("node", "control"):
        found = mounts(BASE[name])
        assert all(any(path.startswith(f"{root}/") for root in found) for path in lasting), name
        assert BASE[name]["environment"] == {"KVHOLD_CONFIG": "/etc/kvhold/kvhold.toml"}
        assert found["/etc/kvhold/kvhold.toml"] == "./kvhold.toml"
    volumes = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"]
    sources = {source for service in BASE.values() for source in mounts(service).values()}
    assert {source for source in sources if not source.startswith(".")} == set(volumes)
    assert all((COMPOSE / source).exists() for source in sources if source.startswith("."))


def test_prometheus_accepts_its_settings_and_scrapes_the_api(tmp_path: Path) -> None:
    settings = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    config = load_config(file=COMPOSE / "kvhold.toml", environ={})
    assert job["static_configs"] == [{"targets": [config.control.listen]}]
    assert BASE["control"]["network_mode"] == BASE["prometheus"]["network_mode"] == "host"
    promtool = needed_program("promtool")
    for source, path in (("prometheus.yml", ""), ("../prometheus", "rules")):
        assert mounts(BASE["prometheus"])[f"/etc/prometheus/{path or source}"].endswith(source)
    shutil.copy(COMPOSE / "prometheus.yml", tmp_path)
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "rules")
    checked = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rule files found" in checked.stdout


@pytest.mark.server
def test_the_containers_work_together_and_their_health_checks_tell(tmp_path: Path) -> None:
    api = f"127.0.0.1:{free_port()}"
    place = Place(
        tmp_path, {"127.0.0.1:7780": api, '"8GiB"': '"64MiB"', "max_bytes=50GiB": "max_bytes=1GiB"}
    )
    files = {"/etc/kvhold/kvhold.toml": SETTINGS}
    containers = {
        name: Container(name, ["kvhold", *command], BASE[name]["environment"], files)
        for name, command in (("node", ["serve"]), ("control", BASE["control"]["command"]))
    }
    node, control = containers["node"], containers["control"]
    healthy = BASE["control"]["healthcheck"]["test"][1:]
    (check,) = re.findall(
        r"^HEALTHCHECK .*\\\n +CMD (.*)$", (DEPLOY / "docker/Dockerfile").read_text(), re.MULTILINE
    )
    checks = ((node, json.loads(check)), (control, healthy))
    with place.running(node) as process, place.running(control):
        for container, command in checks:
            code, says = place.probe(container, command)
            assert code == 0, says
        code, says = place.probe(node, ["kvhold", "status"])
        assert (code, "disk: in use" in says) == (0, True), says
        state = place.path("/var/lib/kvhold", "node")
        eventually(lambda: (state / "state/history").exists())
        assert (state / "disk").is_dir()
        os.kill(process.pid, signal.SIGSTOP)
        code, says = place.probe(node, ["kvhold", "probe", "--timeout-s", "0.5"])
        os.kill(process.pid, signal.SIGCONT)
        assert code == 1, says
