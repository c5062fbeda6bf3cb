"""A tier's line: taken apart, shown without secrets, and refused with the reason."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhold.core.errors import ConfigError
from kvhold.core.setting import setting, size
from kvhold.tiers.url import parse_url


@dataclass(frozen=True)
class Settings:
    path: str = ""
    max_bytes: int = size(0, "most bytes")
    wait_s: float = setting(1.0, "how long", minimum=0)


def test_its_parts() -> None:
    url = parse_url("redis://me:s%40c@a.example:6379,[::1]:7000,b/2?ttl_s=3&name=x%20y")
    assert (url.scheme, url.path, url.username, url.password) == ("redis", "/2", "me", "s@c")
    assert url.hosts == [("a.example", 6379), ("::1", 7000), ("b", None)]
    assert url.options == {"ttl_s": "3", "name": "x y"}
    assert parse_url("disk:///var/my%20cache").path == "/var/my cache"


def test_what_is_shown_has_no_secrets() -> None:
    url = parse_url("redis://me:hush@h:1/0?token=hush&aws_secret_access_key=hush&wait_s=3")
    assert url.shown == "redis://me:***@h:1/0?token=***&aws_secret_access_key=***&wait_s=3"
    assert parse_url("redis://:hush@h").shown == "redis://:***@h"
    assert parse_url("kvhold://hush@h").shown == "kvhold://***@h", (
        "a user without a password may be a token"
    )
    misspelt = (
        "redis://h?pasword=hush&pwd=hush&access-key=hush&tokn_file=/a&key_file=/b&audit_max_keys=3"
    )
    assert "hush" not in parse_url(misspelt).shown
    assert parse_url(misspelt).shown.endswith("&tokn_file=/a&key_file=/b&audit_max_keys=3")


def test_its_repr_shows_no_secrets() -> None:
    url = parse_url("redis://me:hush@h:1/0?token=hush&wait_s=3")
    assert repr(url) == "TierUrl(redis://me:***@h:1/0?token=***&wait_s=3)"


def test_a_secret_may_be_named_instead_of_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PASSWORD", "s%40/c")
    (tmp_path / "token").write_text("t/k@n\n")
    url = parse_url(f"redis://me:${{env:PASSWORD}}@h:1/0?path=${{file:{tmp_path}/token}}")
    assert (url.username, url.password, url.hosts) == ("me", "s%40/c", [("h", 1)])
    assert url.apply(Settings()).path == "t/k@n"
    assert "s%40/c" not in url.shown
    assert parse_url("redis://:${file:/a/b}@h/0").path == "/0"


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("${env:NO_SUCH_VARIABLE}", r"\$\{env:NO_SUCH_VARIABLE\}: this variable is not set"),
        ("${file:/no/such/file}", r"\$\{file:/no/such/file\}: cannot read"),
        ("${file:/dev/null}", r"/dev/null is empty"),
        ("${file:/dev/zero}", r"larger than 64 KiB"),
    ],
)
def test_a_reference_that_cannot_be_read_is_named(reference: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        print(parse_url(f"redis://:{reference}@h/0").password)


@pytest.mark.parametrize(
    ("line", "is_secret"),
    [
        ("redis://:hush@h/0", True),
        ("redis://hush@h/0", True),
        ("redis://me:hush@h/0", True),
        ("redis://h/0?sentinel_password=hush", True),
        ("s3://b?secret_access_key=hush", True),
        ("kvhold://h?token=x${env:A}", True),
        ("redis://me:${env:A}@h/0", False),
        ("redis://:${file:/a/b}@h/0?sentinel_password=${env:B}", False),
        ("kvhold://h?token_file=/etc/token", False),
        ("disk:///d?max_bytes=5GiB", False),
    ],
)
def test_whether_a_line_has_a_secret_in_it_is_known(line: str, is_secret: bool) -> None:
    assert parse_url(line).has_secret is is_secret


def test_options_become_a_dataclass() -> None:
    url = parse_url("disk:///d?max_bytes=5GiB&wait_s=2")
    assert url.apply(Settings(path=url.path)) == Settings("/d", 5 << 30, 2.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/var/cache", r"not a tier's URL"),
        ("disk:///d?max_bytes", r"\?name=value"),
        ("disk:///d?a=1&a=2", r"twice"),
        ("disk:///d#x", r"%23"),
        ("redis://:hush@[::1/0", r"'\[::1/0' is not a URL"),
    ],
)
def test_a_line_that_is_none_is_an_error(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_url(text)


@pytest.mark.parametrize(
    "text", ["disk:///d/a@b", "redis://h/0?name=a@b", "redis://me:hush@h/0?name=a@b"]
)
def test_an_at_sign_that_may_be_the_end_of_a_password_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"://\.\.\.: .*in a path or an option, '@' is %40"):
        parse_url(text)


def test_an_escaped_at_sign_and_the_number_of_a_fault_are_read() -> None:
    assert parse_url("disk:///d/a%40b?name=c%40d").options == {"name": "c@d"}
    assert parse_url("disk:///d/a%40b").path == "/d/a@b"
    text = "faults+disk:///d?faults=get:hang:@3&wait_s=2"
    assert parse_url(text).options == {"faults": "get:hang:@3", "wait_s": "2"}
    rules = "get:delay:0.5@3:20ms,put:hang:@12,get:swap"
    assert parse_url(f"audit+faults+disk:///d?faults={rules}").options == {"faults": rules}


def test_a_bad_option_is_named_with_the_nearest_valid_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"disk:///d\?max_byte=1: there is no setting 'max_byte'; did you mean 'max_bytes'",
    ):
        parse_url("disk:///d?max_byte=1").apply(Settings())
    with pytest.raises(ConfigError, match=r"wait_s = 'soon': must be a number"):
        parse_url("disk:///d?wait_s=soon").apply(Settings())


@pytest.mark.parametrize("netloc", ["h:x", "h:0", "h:70000", "a:1:2"])
def test_a_host_that_is_none_is_an_error(netloc: str) -> None:
    with pytest.raises(ConfigError, match="not host:port"):
        print(parse_url(f"redis://{netloc}/0").hosts)
