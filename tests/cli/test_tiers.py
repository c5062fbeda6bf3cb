"""`kvhold tiers`: what there is, and what can be set."""

from click.testing import CliRunner

from kvhold.cli.tiers import command
from kvhold.core.errors import ConfigError


def test_without_a_scheme_all_are_named() -> None:
    output = CliRunner().invoke(command, []).output
    assert all(name in output for name in ("disk", "redis", "s3", "kvhold", "get_timeout_s"))


def test_with_one_its_options() -> None:
    output = CliRunner().invoke(command, ["disk"]).output
    assert all(name in output for name in ("max_bytes", "policy", "sync", "4.0 GiB"))
    assert CliRunner().invoke(command, ["null"]).output == ""


def test_an_unknown_one_is_an_error() -> None:
    result = CliRunner().invoke(command, ["floppy"])
    assert isinstance(result.exception, ConfigError)
