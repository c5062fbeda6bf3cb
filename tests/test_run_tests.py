"""A failed test runs once more, alone, and is named as flaky if it passes then."""

import subprocess
import sys
from pathlib import Path

RUN_TESTS = Path(__file__).parents[1] / "tools" / "run_tests.py"
FLAKY = """
from pathlib import Path

def test_second_try():
    mark = Path(__file__).with_suffix(".mark")
    first = not mark.exists()
    mark.touch()
    assert not first

def test_right():
    pass
"""


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, str(RUN_TESTS), "stage", "-q", "-p", "no:xdist", "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_test_that_passes_alone_is_printed_as_flaky(tmp_path: Path) -> None:
    done = run(tmp_path, FLAKY)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "FLAKY stage: test_it.py::test_second_try"


def test_a_test_that_fails_twice_fails_the_stage(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_wrong():\n    assert False\n")
    assert done.returncode == 1
    assert "FLAKY" not in done.stdout


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    done = run(tmp_path, "\n".join(f"def test_wrong_{i}():\n    assert False\n" for i in range(4)))
    assert done.returncode == 1
    assert "once more" not in done.stdout
