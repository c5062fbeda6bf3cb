"""Each operation of LMCache's controller and its internal API, as docs/control.md writes it, in a
shell, against a node with a real vLLM; and what is refused there changes nothing.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.node import NodeClient
from kvhold_lab.engines.engine import Engine, options_for
from kvhold_lab.engines.models import make_model
from tests.control.running import control_process
from tests.node.nodes import PATIENT_S, RunningNode, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.server]

DOCS = Path(__file__).parents[2] / "docs/control.md"
CHUNK = 64
PROMPT = [10 + n % 200 for n in range(640)]
TOKENS = ("read", "operate", "acme", "globex")
MOST_BYTES = 20_000


@dataclass
class Served:
    """A node with a vLLM that has computed a prompt, and the API before it."""

    client: NodeClient
    socket: Path
    url: str
    digits: str
    tokens: dict[str, str]

    def shell(self, line: str) -> str:
        api = f'api() {{ curl -sS --fail-with-body --unix-socket {self.socket} "$@"; }}\n'
        done = subprocess.run(
            ["bash", "-c", api + line], capture_output=True, text=True, timeout=PATIENT_S
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    def wait_for(self, job: str) -> None:
        line = f"api localhost/v1/jobs/{job}"
        eventually(lambda: json.loads(self.shell(line))["progress"]["done"])

    def status_of(self, path: str, order: Any, token: str) -> int:
        """By TCP, with a token."""
        order_file = self.socket.with_name("order.json")
        order_file.write_text(json.dumps(order))
        line = f"curl -s -o /dev/null -w '%{{http_code}}' -d @{order_file} {self.url}/{path}"
        line += f" -H 'Authorization: Bearer {token}'"
        return int(subprocess.check_output(["bash", "-c", line], timeout=PATIENT_S))

    def state(self) -> Any:
        status = self.client.status()
        jobs, pins = (json.loads(self.shell(f"api localhost/v1/{x}")) for x in ("jobs", "pins"))
        for pin in pins["pins"]:
            del pin["left_s"]
        return status["namespaces"], status["chunks"], jobs, pins


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    files = {}
    for name in TOKENS:
        files[name] = folder / name
        files[name].write_text(f"t-{name}")
        files[name].chmod(0o600)
    settings = folder / "kvhold.toml"
    settings.write_text(
        f'tiers = ["disk://{folder}/disk?max_bytes=256MiB"]\n[control]\n'
        f'listen = "127.0.0.1:0"\nmax_body_bytes = {MOST_BYTES}\n'
        f'history_file = "{folder}/history"\n'
        f'read_token_file = "{files["read"]}"\noperate_token_file = "{files["operate"]}"\n'
        f'[control.tenant_operate_token_files]\nacme = "{files["acme"]}"\n'
        f'globex = "{files["globex"]}"\n'
    )
    with ExitStack() as stack:
        node = RunningNode(folder / "node.sock", "--config", str(settings))
        stack.callback(node.close)
        client = node.client()
        engine = stack.enter_context(engine_on(node))
        engine.generate(PROMPT, max_tokens=2)
        eventually(lambda: client.status()["chunks"] >= len(PROMPT) // CHUNK)
        assert client.flush(deadline_s=PATIENT_S)
        [space] = client.names()[0]
        url = stack.enter_context(control_process(settings, node))
        tokens = {name: f"t-{name}" for name in TOKENS}
        yield Served(client, folder / "control.sock", url, space.digest.hex()[:12], tokens)


def engine_on(node: RunningNode) -> Engine:
    model = make_model("tiny")
    connector = {
        "kv_connector": "KVHoldConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tokens_per_chunk": CHUNK,
            "rules": {"tenant": "acme"},
            "node": {"socket": str(node.path)},
            "client": {"call_timeout_s": 30},
        },
    }
    return Engine(
        options_for(
            model,
            kv_transfer_config=connector,
            max_model_len=2048,
            block_size=32,
            kv_cache_bytes=8 * 2048 * model.kv_bytes_per_token,
            num_threads=1,
        )
    )


def lines_of_the_docs() -> list[str]:
    return re.findall(r"^api .*$", DOCS.read_text(), re.MULTILINE)


def test_what_is_refused_changes_nothing(served: Served) -> None:
    before = served.state()
    tokens, digits = served.tokens, served.digits
    prompt = {"namespace": digits, "tokens": PROMPT}
    of_instance = {"instance_id": digits, "location": "all"}
    large = {"namespace": digits, "tokens": [1] * MOST_BYTES}
    for path, order, token, expected in (
        ("v1/clear", {"namespace": digits}, "guessed", 401),
        ("clear", of_instance, "guessed", 401),
        ("v1/clear", {"namespace": digits}, tokens["read"], 403),
        ("clear", of_instance, tokens["read"], 403),
        ("v1/clear", {"all": True}, tokens["operate"], 403),
        ("v1/stop", {}, tokens["operate"], 403),
        ("v1/clear", {"namespace": digits}, tokens["globex"], 403),
        ("clear", of_instance, tokens["globex"], 403),
        ("v1/pins", prompt, tokens["globex"], 403),
        ("v1/move", prompt | {"tier": "disk"}, tokens["globex"], 403),
        ("v1/kick", {"pid": 1}, tokens["acme"], 403),
        ("v1/clear", large, tokens["operate"], 413),
        ("v1/clear/all", {"namespace": digits}, tokens["operate"], 404),
        ("v1/status", {}, tokens["read"], 405),
        ("v1/move", prompt | {"tier": "host:10.0.0.9"}, tokens["operate"], 409),
    ):
        assert served.status_of(path, order, token) == expected, (path, token)
    assert served.state() == before
    assert served.status_of("v1/lookup", prompt, tokens["acme"]) == 200


def test_each_operation_is_one_line(served: Served) -> None:
    answers: dict[str, Any] = {}
    for line in lines_of_the_docs():
        made = line.replace("4f0c", served.digits).replace("[1, 2, 3]", json.dumps(PROMPT))
        if '"move-3"' in made:
            made = made.replace("move-3", answers["move"]["event_id"])
        name = re.search(r"localhost/(\w+)", line)
        assert name is not None, line
        answer = served.shell(made)
        answers[name[1]] = answer if name[1] == "metrics" else json.loads(answer)
        if name[1] in ("compress", "decompress", "move"):
            served.wait_for(answers[name[1]]["event_id"].rpartition("-")[2])
    full = answers["query_instance"]["res"]
    assert full.startswith(served.digits)
    assert answers["lookup"]["layout_info"] == {full: ["LocalCPUBackend", len(PROMPT)]}
    assert answers["pin"]["num_tokens"] == len(PROMPT)
    assert answers["check_finish"] == {"status": "done"}
    assert answers["health"]["error_codes"] == {"0": 0}
    assert answers["clear"]["num_tokens"] >= len(PROMPT)
    assert "kvhold_up 1.0" in answers["metrics"]
    assert answers.keys() == {
        *("query_instance", "lookup", "pin", "compress", "decompress", "move", "check_finish"),
        *("health", "clear", "metrics"),
    }
    left = served.shell(f"api localhost/lookup -d '{json.dumps({'tokens': PROMPT})}'")
    assert json.loads(left)["layout_info"] == {}
