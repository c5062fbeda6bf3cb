import sys
from pathlib import Path

import pytest

from kvhold_lab.engines.process import EngineFailed, LoggedProcess

FAILS = """
import sys
print("WARNING: may cause errors like `OSError: Too many open files`", file=sys.stderr)
print("(EngineCore) ERROR RuntimeError: no memory for KV", file=sys.stderr)
print("x" * 10_000, file=sys.stderr)
raise RuntimeError("See root cause above")
"""


def test_a_failure_names_its_first_error_and_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = LoggedProcess("it", [sys.executable, "-c", FAILS], log_path=log, environment={})
    try:
        assert process.wait(60.0)
        with pytest.raises(EngineFailed) as failed:
            raise process.failure("start")
    finally:
        process.kill()
    text = str(failed.value)
    assert "exit code 1; its first error: RuntimeError: no memory for KV; the end" in text
    assert text.rstrip().endswith("RuntimeError: See root cause above")
