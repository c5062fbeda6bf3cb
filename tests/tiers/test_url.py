"""A tier's line: taken apart, shown without secrets, and refused with the reason."""

from dataclasses import dataclass

import pytest

from kvhold.core.config import setting, size
from kvhold.core.errors import ConfigError
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


def test_a_bad_option_is_named_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match=r"disk:///d\?max_byte=1: there is no setting 'max_byte'; did you mean 'max_bytes'"):
        parse_url("disk:///d?max_byte=1").apply(Settings())
    with pytest.raises(ConfigError, match=r"wait_s = 'soon': must be a number"):
        parse_url("disk:///d?wait_s=soon").apply(Settings())


@pytest.mark.parametrize("netloc", ["h:x", "h:0", "h:70000", "a:1:2"])
def test_a_host_that_is_none_is_an_error(netloc: str) -> None:
    with pytest.raises(ConfigError, match="not host:port"):
        print(parse_url(f"redis://{netloc}/0").hosts)
