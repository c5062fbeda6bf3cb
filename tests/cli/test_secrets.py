"""No command takes a secret on its command line, which every user of the host can read."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvhold.cli import doctor, serve
from kvhold.core.errors import ConfigError


@pytest.mark.parametrize("command", [serve.command, doctor.command])
@pytest.mark.parametrize("url", ["redis://:hush@h/0", "s3://b?secret_access_key=hush", "kvhold://:hush@h"])
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(command: click.Command, url: str) -> None:
    result = CliRunner().invoke(command, ["--tier", url])
    assert isinstance(result.exception, ConfigError)
    assert "${env:REDIS_PASSWORD}" in str(result.exception)
    assert "hush" not in str(result.exception) + result.output


def test_a_reference_to_a_secret_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOLD_NODE_SOCKET", str(tmp_path / "node.sock"))
    monkeypatch.setenv("PASSWORD", "hush")
    result = CliRunner().invoke(doctor.command, ["--json", "--tier", "redis://:${env:PASSWORD}@127.0.0.1:1/0"])
    assert result.exit_code == 1, "nobody listens there"
    assert "127.0.0.1:1" in result.output
    assert "hush" not in result.output
