"""`kvhold demo` where there is no vLLM: the same figures, on transformers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhold.cli import cli

FIELDS = {
    "model_params",
    "prompt_tokens",
    "cold_ttft_s",
    "hit_same_ttft_s",
    "hit_new_ttft_s",
    "prefix_cache_ttft_s",
    "tokens_reused",
    "identical",
}


@pytest.mark.slow
def test_without_vllm_it_runs_on_transformers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("command", "run"):
        monkeypatch.setattr(f"kvhold_lab.demo.{module}.is_vllm_available", lambda: False)
    for name in ("CONNECT", "CALL"):
        # a busy machine is no reason to compute
        monkeypatch.setenv(f"KVHOLD_CLIENT_{name}_TIMEOUT_S", "60")
    figures, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    arguments = [
        "demo",
        "--model-size",
        "tiny",
        "--tokens",
        "600",
        "--repeats",
        "1",
        "--json",
        str(figures),
        "--picture",
        str(picture),
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "runs on transformers instead" in result.output
    assert "outputs identical  yes" in result.output
    measured = json.loads(figures.read_text())
    assert measured.keys() >= FIELDS
    assert (measured["prompt_tokens"], measured["tokens_reused"], measured["identical"]) == (
        600,
        599,
        True,
    )
    assert measured["prefix_cache_ttft_s"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sigterm_ends_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def running(*_: Any, **__: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            ended.append(True)

    monkeypatch.setattr("kvhold_lab.demo.command.run", running)
    result = CliRunner().invoke(cli, ["demo", "--model-size", "tiny"])
    assert (result.exit_code, ended) == (128 + signal.SIGTERM, [True])
