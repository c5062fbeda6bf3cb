"""Reading traces: what is right is read, what is not is an error with its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import ConfigError
from kvhold_lab.simulate import requests
from kvhold_lab.simulate.requests import TimedRequest, read_requests

GOOD = {"timestamp": 10, "input_length": 600, "output_length": 3, "hash_ids": [4, 7]}


def trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_lines_are_read_in_their_order(tmp_path: Path) -> None:
    later = {**GOOD, "timestamp": 20.5, "extra": "ignored"}
    assert list(
        read_requests(trace(tmp_path, json.dumps(GOOD), "", json.dumps(later)), TimedRequest)
    ) == [
        TimedRequest(timestamp=10, input_length=600, output_length=3, hash_ids=[4, 7]),
        TimedRequest(timestamp=20.5, input_length=600, output_length=3, hash_ids=[4, 7]),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": 9}, "timestamp 9 is less than 10"),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": None}, "timestamp"),
        ({"input_length": 0, "hash_ids": []}, "input_length of 0"),
        ({"output_length": -1}, "output_length"),
        ({"input_length": 512}, "2 hash_ids for an input_length of 512"),
        ({"hash_ids": [1]}, "1 hash_ids"),
        ({"hash_ids": [1, -2]}, "hash_ids"),
        ({"hash_ids": [1, 2**63]}, "hash_ids"),
        ({"hash_ids": ["a", "b"]}, "hash_ids"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 3: .*{message}"):
        list(
            read_requests(
                trace(tmp_path, json.dumps(GOOD), "", json.dumps({**GOOD, **change})), TimedRequest
            )
        )


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing: No such file"):
        list(read_requests(tmp_path / "nothing", TimedRequest))


def test_a_line_without_an_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_LINE_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match="line 1: more than 1 MiB"):
        list(read_requests(trace(tmp_path, "1" * (1 << 21)), TimedRequest))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    path.write_bytes(content)
    try:
        for request in read_requests(path, TimedRequest):
            assert request.hash_ids
    except ConfigError:
        pass


@pytest.mark.parametrize(
    "line", [b'{"timestamp": "\xff"}', b'{"extra": ' + b"[" * 100_000], ids=["not text", "nested"]
)
def test_a_line_that_cannot_be_decoded_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 1: "):
        list(read_requests(tmp_path / "trace.jsonl", TimedRequest))
