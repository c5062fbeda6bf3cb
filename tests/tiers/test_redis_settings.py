"""How a place in Redis is addressed, and the pure parts: names at the server, values in parts,
commands as bytes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import ConfigError
from kvhold.core.keys import KEY_BYTES
from kvhold.net.stream import Address
from kvhold.tiers.redis import RedisConfig, RedisTier
from kvhold.tiers.redis.names import RedisNames
from kvhold.tiers.redis.resp import command, set_pieces
from kvhold.tiers.redis.settings import config_from
from kvhold.tiers.redis.split import HEAD_BYTES, Head, cut, looks_like_head
from kvhold.tiers.url import parse_url


def config(line: str) -> RedisConfig:
    return config_from(parse_url(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("redis://h", RedisConfig(addresses=(Address("h", 6379),))),
        ("redis://h:7/3", RedisConfig(addresses=(Address("h", 7),), db=3)),
        (
            "valkey://:p%40w@h?db=2",
            RedisConfig(addresses=(Address("h", 6379),), password="p@w", db=2),
        ),
        (
            "rediss://u:p@[::1]:7",
            RedisConfig(addresses=(Address("::1", 7),), username="u", password="p", tls=True),
        ),
        (
            "valkeys://h?verify=none",
            RedisConfig(addresses=(Address("h", 6379),), tls=True, verify="none"),
        ),
        ("unix:///run/r.sock?db=1", RedisConfig(addresses=(Address(socket="/run/r.sock"),), db=1)),
        (
            "redis-cluster://a:1,b",
            RedisConfig(addresses=(Address("a", 1), Address("b", 6379)), cluster=True),
        ),
        (
            "redis://a?cluster=true&tls=yes",
            RedisConfig(addresses=(Address("a", 6379),), cluster=True, tls=True),
        ),
        (
            "valkey-sentinel://u:p@a,b:2/4?service=s&sentinel_password=q",
            RedisConfig(
                addresses=(Address("a", 26379), Address("b", 2)),
                username="u",
                password="p",
                db=4,
                service="s",
                sentinel_password="q",
            ),
        ),
        (
            "redis://h?ttl_s=5&max_value_bytes=1MiB",
            RedisConfig((Address("h", 6379),), ttl_s=5, max_value_bytes=1 << 20),
        ),
    ],
)
def test_an_address_says_where_and_how(line: str, expected: RedisConfig) -> None:
    assert config(line) == expected
    RedisTier(expected)  # no I/O, no loop


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("redis://", "no server"),
        ("unix://?db=0", "no server"),
        ("redis://h/x", "'x'"),
        ("redis://h:0", "host:port"),
        ("redis://h?db=-1", "db"),
        ("redis://a,b", "several"),
        ("redis://h?conections=3", "connections"),
        ("redis://h?connections=0", "connections"),
        ("redis://h?addresses=x", "addresses"),
        ("redis://h?prefix={x}", "prefix"),
        ("redis://h?max_value_bytes=40", "max_value_bytes"),
        ("redis://h?ca_file=x", "TLS"),
        ("redis://u@h", "password"),
        ("redis-cluster://h/1", "database 0"),
        ("redis-cluster://h?service=s", "exclude"),
        ("redis-sentinel://h", "service"),
        ("rediss://h?verify=maybe", "verify"),
    ],
)
def test_what_cannot_be_is_said_before_any_io(line: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        RedisTier.from_url(parse_url(line))


@given(
    st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    st.text(st.characters(codec="ascii", exclude_characters="{}\r\n"), max_size=9),
)
def test_a_name_is_one_keys(key: bytes, prefix: str) -> None:
    names = RedisNames(prefix)
    assert names.key(names.of(key)) == key
    assert names.key(names.of(key)[:-1]) is None
    assert RedisNames(prefix + "x").key(names.of(key)) is None


@given(st.integers(1, 5000), st.integers(1, 900), st.data())
def test_spans_are_the_range_and_nothing_else(
    nbytes: int, part_bytes: int, data: st.DataObject
) -> None:
    head = Head.new(nbytes, part_bytes)
    assert Head.parse(head.pack()) == head
    value = bytes(i % 251 for i in range(nbytes))
    stored = [value[i : i + part_bytes] for i in range(0, nbytes, part_bytes)]
    assert head.num_parts == len(stored)
    start = data.draw(st.integers(0, nbytes - 1))
    length = data.draw(st.integers(1, nbytes - start))
    found = [
        stored[span.part][span.start : span.start + span.nbytes]
        for span in head.part_ranges(start, length)
    ]
    assert b"".join(found) == value[start : start + length]
    assert [len(piece) for piece in found] == [
        span.nbytes for span in head.part_ranges(start, length)
    ]


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_a_cut_is_a_slice_of_the_same_memory(parts: list[bytes], start: int, nbytes: int) -> None:
    assert (
        b"".join(cut([memoryview(part) for part in parts], start, nbytes))
        == b"".join(parts)[start : start + nbytes]
    )


@given(st.binary(max_size=60))
def test_other_bytes_are_no_head(data: bytes) -> None:
    assert not looks_like_head(data)
    assert Head.parse(data + bytes(HEAD_BYTES)) is None


def test_a_set_is_the_command_with_the_value_in_it() -> None:
    pieces = set_pieces(b"name", [memoryview(b"va"), memoryview(b"lue")], "NX", "PX", 50)
    assert b"".join(pieces) == command("SET", b"name", b"value", "NX", "PX", 50)
    assert (
        b"".join(set_pieces(b"n", [memoryview(b"v")]))
        == command("SET", "n", "v")
        == b"*3\r\n$3\r\nSET\r\n$1\r\nn\r\n$1\r\nv\r\n"
    )
