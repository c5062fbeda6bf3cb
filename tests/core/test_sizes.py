"""Sizes as people write them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (123, 123),
        ("0", 0),
        ("123", 123),
        ("123b", 123),
        ("123 B", 123),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("1k", 1024),
        ("1kB", 1000),
        ("1KB", 1000),
        ("5GiB", 5 << 30),
        ("5 GiB", 5 << 30),
        ("  5gib\n", 5 << 30),
        ("4g", 4 << 30),
        ("2GB", 2 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("0.5k", 512),
        ("2T", 2 << 40),
        ("1TB", 10**12),
        ("0.1GiB", (1 << 30) // 10),
        ("9007199254740993", 2**53 + 1),  # what a float cannot hold
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "bad",
    [
        *(
            "",
            " ",
            "GiB",
            "5 GiBs",
            "5XB",
            "5 5",
            "-5",
            "-5GiB",
            "+5",
            "1e9",
            "1,5GiB",
            "1.GiB",
            ".5GiB",
            "5GiB!",
            "0x10",
            "nan",
            "inf",
        ),
        *(-1, True, False, 1.5, None, b"5GiB", [5]),
    ],
)
def test_what_is_no_size_is_refused_with_what_is_accepted(bad: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(bad)


def test_a_number_without_end_is_a_large_size() -> None:
    assert parse_size("9" * 500 + ".5GiB") > 2**64


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_a_size_is_written_with_a_binary_unit(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 1 << 50))
def test_what_is_written_can_be_read_to_its_precision(num_bytes: int) -> None:
    again = parse_size(format_size(num_bytes))
    assert abs(again - num_bytes) <= num_bytes / 20 + 1
