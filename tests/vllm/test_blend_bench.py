import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhold_lab.bench.command import command
from kvhold_lab.retrieval.training import TrainingPhase, train

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_row_of_vllm_counts(tmp_path: Path) -> None:
    train(tmp_path / "model", (TrainingPhase(2, 2, 8, 9, 2, 64),), lambda said: None)
    arguments = ["blend", "--engine", "vllm", "--selector", "query-10"]
    arguments += ["--model", str(tmp_path / "model")]
    size = ["--tokens", "1004", "--prompts", "3", "--json", str(tmp_path / "rows.json")]
    result = CliRunner().invoke(command, [*arguments, *size])
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["engine"], row["selector"], row["prompts"]) == ("vllm", "query-10", 3)
    # 200 tokens a document, of which 192 are whole blocks
    assert row["reused_tokens"] == 5 * 192 - 96
    assert 0 <= row["f1"] <= 1 and 0 <= row["f1_full"] <= 1
    assert 0 < row["kl"] < 1
