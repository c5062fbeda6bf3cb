"""The chart: accepted by helm and by Kubernetes' schemas, whole, and true to the settings."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from kvhold import __version__
from kvhold.control.access import Access
from kvhold.core.config import Config, load_config
from kvhold.core.metrics import Metrics
from kvhold.net.addresses import split_address
from kvhold.node import NodeClient
from kvhold.node.central import Central
from kvhold.node.peer_server import PeerServer
from kvhold.testing.cache import a_prompt, store
from kvhold.tiers.registry import make_tier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.base import NotInstalled, free_port
from kvhold_lab.servers.certificates import Certificates, make_certificates
from tests.deploy.charts import (
    CHART,
    EXPOSED,
    NAMESPACE,
    SECRET,
    VALUES,
    Rendered,
    helm,
    render,
    template,
)
from tests.deploy.containers import Container, Place
from tests.node.nodes import PATIENT, PATIENT_S, SPACE
from tests.programs import needed_package

EXAMPLE = CHART.parents[1] / "kubernetes/engine.yaml"
OLDEST, NEWEST = "1.27", "1.37"
TOKENS = ("peers", "central", "read", "operate", "administer")
TLS = "/etc/kvhold/tls"


@pytest.fixture(params=VALUES)
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> Rendered:
    return render(VALUES[request.param], tmp_path)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    try:
        return make_certificates(tmp_path)
    except NotInstalled as missing:
        pytest.skip(str(missing))


def secrets(certificates: Certificates) -> dict[str, str]:
    """Content by path."""
    return {f"/etc/kvhold/tokens/{name}": f"token of {name}" for name in TOKENS} | {
        f"{TLS}/tls.crt": certificates.server.read_text(),
        f"{TLS}/tls.key": certificates.server_key.read_text(),
        f"{TLS}/ca.crt": certificates.ca.read_text(),
    }


def check_schemas(objects: list[dict[str, Any]], version: str) -> None:
    validate = needed_package("kubernetes_validate")
    for one in objects:
        validate.validate(one, version, strict=True)


@pytest.mark.parametrize("values", VALUES)
def test_the_linter_finds_nothing(values: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(VALUES[values]))
    done = helm("lint", "--strict", CHART, "--namespace", NAMESPACE, "--values", file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_its_objects_are_kubernetes_objects(rendered: Rendered, version: str) -> None:
    check_schemas(rendered.objects, version)
    for one in rendered.objects:
        name = one["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_example_of_an_engine_is_a_kubernetes_object(version: str) -> None:
    check_schemas(list(yaml.safe_load_all(EXAMPLE.read_text())), version)


def test_the_schemas_refuse_what_is_none() -> None:
    with pytest.raises(Exception, match="hostPath"):
        check_schemas(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": "a"},
                    "spec": {
                        "containers": [{"name": "a"}],
                        "volumes": [{"name": "a", "hostPath": {"folder": "/a"}}],
                    },
                }
            ],
            NEWEST,
        )


def test_it_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["user"] == 10001


def test_what_is_named_is_there(rendered: Rendered) -> None:
    """Volumes, keys of secrets, service accounts, ports, pods of services."""
    accounts = rendered.of_kind("ServiceAccount")
    services = rendered.of_kind("Service")
    for container, pod in rendered.containers():
        assert pod["serviceAccountName"] in accounts
        volumes = {one["name"] for one in pod["volumes"]}
        claimed = {
            claim["metadata"]["name"]
            for one in rendered.of_kind("StatefulSet").values()
            for claim in one["spec"].get("volumeClaimTemplates", ())
        }
        assert {one["name"] for one in container["volumeMounts"]} <= volumes | claimed
    for pod in rendered.pods().values():
        mounted = {
            mount["name"]
            for one in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
            for mount in one["volumeMounts"]
        }
        assert {volume["name"] for volume in pod["spec"]["volumes"]} <= mounted
        for volume in pod["spec"]["volumes"]:
            if (secret := volume.get("secret")) and secret["secretName"] not in (
                SECRET,
                "my-tokens",
            ):
                data = rendered.of_kind("Secret")[secret["secretName"]]["data"]
                assert {item["key"] for item in secret["items"]} <= set(data)
                assert len(set(data.values())) == len(data)
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
    for service in services.values():
        (port,) = service["spec"]["ports"]
        found = [
            one
            for pod in rendered.pods().values()
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
            for container in pod["spec"]["containers"]
            for one in container.get("ports", ())
            if one["name"] == port["targetPort"]
        ]
        assert [one["containerPort"] for one in found] == [port["port"]]
    for one in rendered.of_kind("StatefulSet").values():
        assert one["spec"]["serviceName"] in services


def test_containers_have_probes_that_may_answer_in_time(rendered: Rendered) -> None:
    for container, _ in rendered.containers():
        live = container["livenessProbe"]
        assert container["startupProbe"]["exec"] == live["exec"]
        assert live["exec"]["command"][-1] == "--live"
        asks = {"node": True, "central": True, "control": False}[container["name"]]
        assert ("readinessProbe" in container) is asks
        # kvhold probe waits for 5 s
        assert all(container[one]["timeoutSeconds"] > 5 for one in container if "Probe" in one)


def test_containers_run_without_rights(rendered: Rendered) -> None:
    for container, pod in rendered.containers():
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["runAsNonRoot"] is (context["runAsUser"] != 0)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["fsGroup"] == context["runAsUser"]


def place_of(rendered: Rendered, folder: Path, words: Mapping[str, str] | None = None) -> Place:
    """Services are on this host."""
    names = {f"{service}.{NAMESPACE}.svc": "localhost" for service in rendered.of_kind("Service")}
    return Place(folder, names | dict(words or {}))


def settings(container: Container, place: Place) -> Config:
    """As kvhold reads them."""
    place.write_files(container)
    environ = place.environ(container)
    return load_config(environ=environ)


async def test_its_settings_are_kvholds_and_serve_nobody_without_a_token(
    rendered: Rendered, certificates: Certificates, tmp_path: Path
) -> None:
    place = place_of(rendered, tmp_path / "place")
    there = secrets(certificates)
    for container, pod in rendered.containers():
        process = rendered.as_process(container, pod, there)
        config = settings(process, place)
        assert config != Config()
        role = process.name
        if role == "node":
            for tier in config.tiers:
                url = parse_url(tier)
                assert not url.has_secret
                made, _ = make_tier(tier)
                await made.close()
            if config.peers.listen:
                PeerServer(config.peers, cast(Any, None), cast(Any, None), Metrics()).close()
        elif role == "control":
            host, port = split_address(config.control.listen, "control.listen")
            Access(config.control, host)
            exposed = "ports" in container
            assert exposed is (host == "0.0.0.0")
            if exposed:
                assert container["ports"][0]["containerPort"] == port
        else:
            store = SimpleNamespace(metrics=Metrics())
            assert Central(config, cast(Any, store)).port == container["ports"][0]["containerPort"]


def test_tiers_name_services_with_their_ports(rendered: Rendered) -> None:
    services = {
        f"{name}.{NAMESPACE}.svc": service["spec"]["ports"][0]["port"]
        for name, service in rendered.of_kind("Service").items()
    }
    for container, pod in rendered.containers():
        for tier in yaml.safe_load(rendered.settings_of(container, pod)).get("tiers", ()):
            url = parse_url(tier if isinstance(tier, str) else tier["url"])
            for host, port in url.hosts:
                assert services[host] == port


def test_values_win_and_lasting_files_are_in_lasting_folders(tmp_path: Path) -> None:
    rendered = render(VALUES["all"], tmp_path)
    (found,) = (
        rendered.settings_of(container, pod)
        for container, pod in rendered.containers()
        if container["name"] == "node"
    )
    read = yaml.safe_load(found)
    assert read["rules"] == {"ttl_s": 3600}
    assert read["node"] == {"autostart": False, "numa": "near", "socket": "/run/kvhold/node.sock"}
    assert (read["ram_bytes"], read["huge_pages"]) == ("64GiB", "always")
    assert [tier if isinstance(tier, str) else tier["url"] for tier in read["tiers"][:2]] == [
        "disk:///var/lib/kvhold/disk?max_bytes=100GiB",
        "disk:///var/lib/kvhold/more",
    ]
    assert [tier.split("://")[0] for tier in read["tiers"][2:]] == ["peers-dns", "kvholds"]
    assert read["clears_file"].startswith("/var/lib/kvhold/")
    limits = rendered.pods()["node"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "10Gi", "hugepages-2Mi": "64Gi"}


def test_a_change_of_settings_starts_new_pods(tmp_path: Path) -> None:
    def annotations(**node: Any) -> dict[str, Any]:
        pods = render({"node": node}, tmp_path).pods()
        found: dict[str, Any] = pods["node"]["metadata"]["annotations"]
        return found

    assert annotations(ramBytes="4GiB") == annotations(ramBytes="4GiB")
    assert annotations(ramBytes="4GiB") != annotations(ramBytes="5GiB")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (EXPOSED, "need TLS: set tls.existingSecret, or tls.insecure=true"),
        ({"peers": {"enabled": True}}, "need TLS"),
        (EXPOSED | {"tls": {"existingSecret": "a", "insecure": True}}, "exclude each other"),
        ({"node": {"ramByte": "8GiB"}}, "ramByte"),
        ({"node": {"ramBytes": "8"}}, "ramBytes"),
        ({"node": {"tiers": ["disk"]}}, "tiers"),
        ({"node": {"socketFolder": "run/kvhold"}}, "socketFolder"),
        ({"node": {"probes": {"liveness": {"timeoutSeconds": 1}}}}, "timeoutSeconds"),
        ({"control": {"port": 0}}, "port"),
        ({"user": "root"}, "user"),
    ],
)
def test_values_that_cannot_work_are_refused(
    values: dict[str, Any], told: str, tmp_path: Path
) -> None:
    done: subprocess.CompletedProcess[str] = template(values, tmp_path)
    assert done.returncode != 0
    assert told in done.stderr


@pytest.mark.server
def test_its_pods_work_together_and_their_probes_tell(
    certificates: Certificates, tmp_path: Path
) -> None:
    """The containers as processes: node, API and central store."""
    rendered = render(VALUES["tls"] | {"node": {"ramBytes": "64MiB"}}, tmp_path)
    ports = {str(port): str(free_port()) for port in (7710, 7711, 7780)}
    patient = "?probe_timeout_s=60&get_timeout_s=60&put_timeout_s=60&token_file="
    local = {
        "0.0.0.0": "127.0.0.1",
        "ram_bytes: 8GiB": "ram_bytes: 64MiB",
        "?token_file=": patient,
    }
    found = {
        container["name"]: (container, rendered.as_process(container, pod, secrets(certificates)))
        for container, pod in rendered.containers()
    }
    places = {
        name: place_of(rendered, tmp_path / ("b" if name == "central" else "a"), local | ports)
        for name in found
    }
    socket = places["node"].path("/run/kvhold/node.sock", "node")
    prompt = a_prompt(SPACE, 200)

    def probe(name: str, which: str) -> tuple[int, str]:
        container, process = found[name]
        return places[name].probe(process, container[which]["exec"]["command"])

    def run(name: str) -> Any:
        return places[name].running(found[name][1])

    def client() -> NodeClient:
        client = NodeClient(socket, PATIENT)
        client.register(SPACE)
        return client

    with run("central"):
        with run("node"), run("control"):
            for name, (container, _) in found.items():
                # the first is also the one at the start
                for which in {"livenessProbe", "readinessProbe"} & set(container):
                    code, says = probe(name, which)
                    assert code == 0, says
            with client() as engine:
                store(engine, prompt)
                assert engine.flush(deadline_s=PATIENT_S)
        code, says = probe("control", "livenessProbe")
        assert code == 1, says
        with run("node"), client() as engine, engine.lookup(prompt.query()) as hit:
            assert hit.sources == {"kvholds": 200}
    code, says = probe("central", "livenessProbe")
    assert code == 1, says
