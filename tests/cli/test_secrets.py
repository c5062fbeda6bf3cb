"""No command takes a secret on its command line, which every user of the host can read."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvhold.cli import doctor, serve
from kvhold.core.errors import ConfigError
from tests.node.nodes import RunningNode, eventually, run_kvhold


@pytest.mark.parametrize("command", [serve.command, doctor.command])
@pytest.mark.parametrize(
    "url", ["redis://:hush@h/0", "s3://b?secret_access_key=hush", "kvhold://:hush@h"]
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(
    command: click.Command, url: str
) -> None:
    result = CliRunner().invoke(command, ["--tier", url])
    assert isinstance(result.exception, ConfigError)
    assert "${env:REDIS_PASSWORD}" in str(result.exception)
    assert "hush" not in str(result.exception) + result.output


def test_a_reference_to_a_secret_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOLD_NODE_SOCKET", str(tmp_path / "node.sock"))
    monkeypatch.setenv("PASSWORD", "hush")
    result = CliRunner().invoke(
        doctor.command, ["--json", "--tier", "redis://:${env:PASSWORD}@127.0.0.1:1/0"]
    )
    assert result.exit_code == 1, "nobody listens there"
    assert "127.0.0.1:1" in result.output
    assert "hush" not in result.output


@pytest.mark.server
@pytest.mark.usefixtures("executed")
def test_a_secret_of_a_tier_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    """Not on the node's command line, in its log, its status, or what doctor and the tools say."""
    lines = [
        "redis://me:hush@127.0.0.1:1/0",
        "kvhold://:hush@127.0.0.1:1?name=central",
        "s3://bucket?endpoint=http://127.0.0.1:1&access_key_id=hush&secret_access_key=hush",
    ]
    quoted = ", ".join(f'"{line}"' for line in lines)
    (tmp_path / "k.toml").write_text(f'tiers = [{quoted}]\nlisten.token = "hush"\n')
    node = RunningNode(tmp_path / "node.sock", "--config", str(tmp_path / "k.toml"))
    try:
        with node.client() as client:
            eventually(lambda: any(tier["last_fault"] for tier in client.status()["tiers"]))
            told = [
                json.dumps(client.status()),
                node.log.read_text(),
                Path(f"/proc/{node.pid}/cmdline").read_text(),
            ]
        done = run_kvhold(
            "doctor",
            "--config",
            str(tmp_path / "k.toml"),
            "--json",
            KVHOLD_NODE_SOCKET=str(node.path),
        )
        told += [done.stdout, done.stderr]
    finally:
        node.close()
    assert "127.0.0.1:1" in told[0]
    assert [text for text in told if "hush" in text] == []
