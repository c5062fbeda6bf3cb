"""A real Prometheus scrapes `kvhold control` with its token, and evaluates the rules and the
dashboard of deploy/.
"""

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvhold.testing.cache import a_prompt, store
from kvhold_lab.servers.base import ServerProcess
from tests.control.running import control_process
from tests.deploy.test_files import DEPLOY, RULES, expressions
from tests.node.nodes import PATIENT_S, SPACE, RunningNode, eventually
from tests.programs import needed_program

EVERY = "1s"


class PrometheusServer(ServerProcess):
    """The settings of deploy/compose, with other times and targets."""

    def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        settings = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
        settings["global"] = {
            "scrape_interval": EVERY,
            "scrape_timeout": EVERY,
            "evaluation_interval": EVERY,
        }
        settings["scrape_configs"] = list(jobs)
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        shutil.copytree(RULES.parent, self.folder / "rules")

    def command(self) -> Sequence[str]:
        return [
            needed_program("prometheus"),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def answers(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
            return True

    def ask(self, path: str, **parameters: str) -> Any:
        """Raises OSError for an error, such as an expression that it does not accept."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=PATIENT_S) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        found = self.ask("query", query=expression)["result"]
        return [float(one["value"][1]) for one in found]

    def has(self, expected: Mapping[str, float]) -> bool:
        return all(self.values(one) == [value] for one, value in expected.items())

    def rules(self) -> dict[str, Any]:
        return {
            rule["name"]: rule for group in self.ask("rules")["groups"] for rule in group["rules"]
        }


@dataclass
class Scraped:
    node: RunningNode
    prometheus: PrometheusServer


@pytest.fixture
def scraped(node: RunningNode, tmp_path: Path) -> Iterator[Scraped]:
    """By one job with the token, by another with a wrong one."""
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"{name}-token")
        (tmp_path / name).chmod(0o600)
    settings = tmp_path / "control.toml"
    settings.write_text(
        f'[control]\nlisten = "127.0.0.1:0"\nread_token_file = "{tmp_path}/right"\n'
        f'history_file = "{tmp_path}/history"\n'
    )
    with control_process(settings, node) as url:
        jobs = [
            {
                "job_name": name,
                "authorization": {"credentials_file": str(tmp_path / name)},
                "static_configs": [{"targets": [url.removeprefix("http://")]}],
            }
            for name in ("right", "wrong")
        ]
        with PrometheusServer(jobs) as prometheus:
            yield Scraped(node, prometheus)


def test_it_has_the_values_of_the_status_and_none_with_a_wrong_token(scraped: Scraped) -> None:
    client, prometheus = scraped.node.client(), scraped.prometheus
    client.register(SPACE)
    for seed in (1, 2):
        prompt = a_prompt(SPACE, 64 * seed, seed)
        store(client, prompt)
        with client.lookup(prompt.query()) as hit:
            assert hit.num_tokens == 64 * seed
        status = client.status()
        expected = {
            "kvhold_up": 1,
            "kvhold_chunks": status["chunks"],
            "kvhold_arena_used_bytes": status["used_bytes"],
            'kvhold_hit_tokens_total{source="ram"}': 64 * (1 + 2 * (seed - 1)),
        }
        assert status["chunks"] == 4 * (1 + 2 * (seed - 1)) and status["used_bytes"]
        eventually(partial(prometheus.has, expected))
    eventually(lambda: prometheus.values('up{job="wrong"}') == [0])
    assert prometheus.values('up{job="right"}') == [1]
    targets = {
        one["labels"]["job"]: (one["health"], one["lastError"])
        for one in prometheus.ask("targets")["activeTargets"]
    }
    assert targets["right"] == ("up", "")
    assert targets["wrong"][0] == "down" and "401" in targets["wrong"][1]


def test_it_evaluates_the_rules_and_the_dashboard(scraped: Scraped) -> None:
    client, prometheus = scraped.node.client(), scraped.prometheus
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    store(client, prompt)

    def ratio_is_recorded() -> bool:
        with client.lookup(prompt.query()):
            pass
        return prometheus.values("kvhold:hit_ratio:rate10m") == [pytest.approx(1)]

    eventually(ratio_is_recorded)
    wanted = {
        rule.get("alert", rule.get("record"))
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }
    eventually(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules().values()))
    rules = prometheus.rules()
    assert rules.keys() == wanted
    for name, rule in rules.items():
        assert (rule["health"], rule.get("lastError")) == ("ok", None), name
        assert rule.get("state", "inactive") == "inactive", name
    for text in expressions().values():
        text = text.replace("$__rate_interval", "1m").replace("$instance", ".*")
        prometheus.ask("query", query=text)
    assert prometheus.values("kvhold_up") == [1]
    scraped.node.close()
    eventually(lambda: prometheus.rules()["KVHoldNodeDown"]["state"] == "pending")
