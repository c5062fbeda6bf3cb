"""The chart as helm renders it."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.containers import Container
from tests.programs import needed_program

CHART = Path(__file__).parents[2] / "deploy/helm/kvhold"
NAMESPACE = "serving"
SECRET = "kvhold-tls"

EXPOSED = {"control": {"expose": True}, "peers": {"enabled": True}, "central": {"enabled": True}}
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "tls": EXPOSED | {"tls": {"existingSecret": SECRET}},
    "insecure": EXPOSED | {"tls": {"insecure": True}},
    "peers": {"peers": {"enabled": True}, "tls": {"existingSecret": SECRET}},
    "central": {
        "central": {
            "enabled": True,
            "storage": {"size": "", "className": ""},
            "settings": {"policy": "lfu"},
        },
        "control": {"enabled": False},
        "tls": {"existingSecret": SECRET},
        "auth": {"existingSecret": "my-tokens"},
    },
    "all": EXPOSED
    | {
        "tls": {"existingSecret": SECRET},
        "user": 0,
        "image": {"repository": "registry.example/kvhold", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "fullnameOverride": "cache",
        "serviceAccount": {"create": True, "name": "cache", "annotations": {"a": "b"}},
        "node": {
            "ramBytes": "64GiB",
            "hugepages": "64Gi",
            "tiers": [
                "disk:///var/lib/kvhold/disk?max_bytes=100GiB",
                {"url": "disk:///var/lib/kvhold/more", "max_bytes": "10GiB"},
            ],
            "settings": {"rules": {"ttl_s": 3600}, "node": {"numa": "near"}},
            "env": [{"name": "KVHOLD_LOG_LEVEL", "value": "DEBUG"}],
            "envFrom": [{"secretRef": {"name": "redis"}}],
            "hostPID": True,
            "priorityClassName": "system-node-critical",
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"c": "d"},
            "podLabels": {"e": "f"},
        },
        "central": {
            "enabled": True,
            "storage": {"size": "1Ti", "className": "fast"},
            "env": [{"name": "KVHOLD_LOG_LEVEL", "value": "DEBUG"}],
            "envFrom": [{"secretRef": {"name": "redis"}}],
            "priorityClassName": "high",
            "nodeSelector": {"disk": "yes"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"c": "d"},
            "podLabels": {"e": "f"},
        },
    },
}


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([needed_program("helm"), *arguments], capture_output=True, text=True)


def template(values: Mapping[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    return helm("template", "kvhold", CHART, "--namespace", NAMESPACE, "--values", file)


@dataclass(frozen=True)
class Rendered:
    objects: list[dict[str, Any]]

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        """By name."""
        return {one["metadata"]["name"]: one for one in self.objects if one["kind"] == kind}

    def pods(self) -> dict[str, dict[str, Any]]:
        """Pod specs by the end of their owner's name: node, central."""
        owners = self.of_kind("DaemonSet") | self.of_kind("StatefulSet")
        return {name.rpartition("-")[2]: one["spec"]["template"] for name, one in owners.items()}

    def containers(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each with its pod's spec; without those that only prepare it."""
        for pod in self.pods().values():
            for container in pod["spec"]["containers"]:
                yield container, pod["spec"]

    def settings_of(self, container: dict[str, Any], pod: dict[str, Any]) -> str:
        """The file that it mounts."""
        (mount,) = (one for one in container["volumeMounts"] if one["name"] == "settings")
        (volume,) = (one for one in pod["volumes"] if one["name"] == "settings")
        data = self.of_kind("ConfigMap")[volume["configMap"]["name"]]["data"]
        assert mount["mountPath"].endswith(f"/{mount['subPath']}")
        text: str = data[mount["subPath"]]
        return text

    def as_process(
        self, container: dict[str, Any], pod: dict[str, Any], secrets: Mapping[str, str]
    ) -> Container:
        """secrets: content by path in the container"""
        environ = {"POD_IP": "127.0.0.1"}
        for variable in container["env"]:
            text = variable.get("value", environ.get(variable["name"], ""))
            environ[variable["name"]] = text.replace("$(POD_IP)", environ["POD_IP"])
        (path,) = (
            one["mountPath"] for one in container["volumeMounts"] if one["name"] == "settings"
        )
        mounted = [one["mountPath"] for one in container["volumeMounts"]]
        there = {
            name: text
            for name, text in secrets.items()
            if any(name.startswith(f"{folder}/") for folder in mounted)
        }
        command = [*container["command"], *container["args"]]
        files = {path: self.settings_of(container, pod)} | there
        return Container(container["name"], command, environ, files)


def render(values: Mapping[str, Any], folder: Path) -> Rendered:
    done = template(values, folder)
    assert done.returncode == 0, done.stderr
    return Rendered([one for one in yaml.safe_load_all(done.stdout) if one])
