"""`kvhold size`: what it prints, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvhold.cli import cli
from kvhold.core.errors import ConfigError


def size(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["size", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result


def measured(*arguments: str) -> dict[str, Any]:
    result = size(*arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_model_in_numbers() -> None:
    answer = measured(
        "meta-llama/Llama-3.1-8B",
        "--tp",
        "4",
        "--tokens",
        "1000",
        "--ram",
        "1GiB",
        "--disk",
        "2GiB",
        "--codec",
        "int8",
    )
    assert answer["token_bytes"] == 131_072
    assert answer["rank_token_bytes"] == 32_768
    assert answer["chunk_bytes"] == 128 * 131_072
    assert answer["prompt_bytes"] == answer["prompt_hit_bytes"] == 1_000 * 131_072
    assert answer["fits"] == [
        {"place": "ram", "size_bytes": 1 << 30, "codec": "raw", "ratio": 1.0, "tokens": 8_192},
        {
            "place": "disk",
            "size_bytes": 2 << 30,
            "codec": "int8",
            "ratio": 1.877,
            "tokens": 240 * 128,
        },
    ]


def test_a_model_in_words() -> None:
    shown = size("google/gemma-3-27b-it", "--tp", "2", "--disk", "1TiB").stdout
    for what in (
        "52 layers see the last 1,024 tokens",
        "507,904 B",
        "one of 2 workers",
        "cachegen",
        "those of a small trained model",
    ):
        assert what in shown


def test_what_is_not_known_is_said() -> None:
    assert (
        "36 layers keep a state, whose size is not known"
        in size("Qwen/Qwen3-Next-80B-A3B-Instruct").stdout
    )


def test_kv_of_eight_bits_fits_as_it_is() -> None:
    assert [
        row["codec"]
        for row in measured("meta-llama/Llama-3.1-8B", "--dtype", "fp8", "--disk", "1GiB")["fits"]
    ] == ["raw"]


@pytest.mark.parametrize(("dtype", "codec"), [("fp8", "int8"), ("bf16", "of-a-plugin")])
def test_what_a_codec_makes_of_it_that_was_not_measured_is_counted_raw_and_said(
    tmp_path: Path, dtype: str, codec: str
) -> None:
    file = tmp_path / "kvhold.toml"
    file.write_text(f'tiers = ["disk:///kv?max_bytes=8GiB&codec={codec}"]\n')
    answer = measured("meta-llama/Llama-3.1-8B", "--dtype", dtype, "--config", str(file))
    assert [row["codec"] for row in answer["fits"] if row["place"].startswith("disk:")] == ["raw"]
    assert any(
        f"the ratio of {codec} on" in note and "disk:///kv" in note for note in answer["notes"]
    )


def test_the_places_of_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "kvhold.toml"
    file.write_text(
        'ram_bytes = "4GiB"\ntiers = ["disk:///kv?max_bytes=8GiB&codec=lossless", '
        '"redis://host:6379/0"]\n'
    )
    rows = measured("meta-llama/Llama-3.1-8B", "--config", str(file))["fits"]
    assert [
        (row["place"].partition("?")[0], row["codec"], row["size_bytes"] >> 30) for row in rows
    ] == [
        ("ram", "raw", 4),
        ("disk:///kv", "lossless", 8),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nobody/nothing",),
            "nobody/nothing: no such file or folder, and no model of that name is known",
        ),
        (("meta-llama/Llama-3.1-8B", "--tp", "3"), "tp is 3; it must divide the 8 KV heads"),
        (
            ("meta-llama/Llama-3.1-8B", "--dtype", "fp32", "--disk", "1GiB", "--codec", "int8"),
            "for float32 use raw",
        ),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(*arguments)


def test_a_size_that_is_none_is_named() -> None:
    result = CliRunner().invoke(cli, ["size", "meta-llama/Llama-3.1-8B", "--ram", "much"])
    assert result.exit_code == 2
    assert "'much' is not a size" in result.output
