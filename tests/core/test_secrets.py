"""Which names mean a secret, and references that stand for one."""

from pathlib import Path

import pytest

from kvhold.core.errors import ConfigError
from kvhold.core.secrets import is_secret_name, read_secret, referenced_variables, resolve


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "password",
        "pasword",
        "pwd",
        "sentinel_password",
        "secret_access_key",
        "session_token",
        "auth",
    ],
)
def test_names_that_mean_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "token_file",
        "key_file",
        "tls_key",
        "tokens_per_chunk",
        "skip_last_n_tokens",
        "max_keys",
        "prefix",
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)


def test_references_are_replaced_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(" one\n")
    text = f"x${{env:A}}y${{file:{tmp_path}/a}}z"
    assert resolve(text, where="here", environ={"A": "${env:B}"}) == "x${env:B}yonez", (
        "and what they stand for is text"
    )
    assert resolve("$A ${A} ${env:}", where="here", environ={}) == "$A ${A} ${env:}"


def test_variables_that_settings_refer_to_are_known() -> None:
    lines = [
        "redis://${env:USER_A}:${env:PASSWORD}@h",
        "kvhold://h?token=${file:/a}",
        "=env:KEY",
        "acme=env:ACME",
        "b=file:/k",
    ]
    assert referenced_variables(lines) == {"USER_A", "PASSWORD", "KEY", "ACME"}


def test_a_file_that_is_no_text_is_refused_without_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hush\xff")
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        read_secret(tmp_path / "a", where="here")
    assert "hush" not in str(caught.value)


def test_a_secret_file_that_everybody_can_read_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, mode in (("open", 0o644), ("closed", 0o640)):
        (tmp_path / name).write_text("hush")
        (tmp_path / name).chmod(mode)
        for _ in range(2):
            read_secret(tmp_path / name, where="here")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{tmp_path}/open holds a secret")
    assert "hush" not in record.getMessage()
