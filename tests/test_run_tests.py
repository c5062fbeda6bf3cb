"""A failed test runs once more, alone, and is named as flaky if it passes then. Measured stages are
reported together, and a floor holds in CI.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.report_coverage import exit_status, summary

RUN_TESTS = Path(__file__).parents[1] / "tools" / "run_tests.py"
REPORT_COVERAGE = RUN_TESTS.with_name("report_coverage.py")
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


IN_A_CHILD = """
import subprocess
import sys

def test_child():
    subprocess.run([sys.executable, "-c", "import kvhold.core.errors"], check=True)
"""


def run(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    stage = [*options, "stage", "-q", "-p", "no:xdist", "test_it.py"]
    return run_program(folder, RUN_TESTS, *stage)


def run_program(
    folder: Path, program: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    # without what measures this test itself
    environment = {k: v for k, v in os.environ.items() if k != "CI" and "COVERAGE" not in k}
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=folder,
        env=environment | more,
        capture_output=True,
        text=True,
        check=False,
    )


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


def test_a_measured_stage_is_reported_with_its_child_processes(tmp_path: Path) -> None:
    earlier = tmp_path / ".coverage/stage/data.earlier"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("no data")
    assert run(tmp_path, IN_A_CHILD, "--measure").returncode == 0
    assert not earlier.exists()

    done = run_program(tmp_path, REPORT_COVERAGE, "stage", "--part", "core")
    assert done.returncode == 0
    [errors] = [line for line in done.stdout.splitlines() if "core/errors.py" in line]
    assert errors.split()[3] != "0%"

    done = run_program(tmp_path, REPORT_COVERAGE, "stage", CI="1")
    assert done.stdout.startswith("coverage "), done.stderr
    assert done.returncode == 1, "one import covers less than the floor"


@pytest.mark.parametrize(
    ("percent", "environment", "status"),
    [(91.9, {"CI": "1"}, 1), (92.0, {"CI": "1"}, 0), (91.9, {}, 0), (91.9, {"CI": ""}, 0)],
)
def test_the_floor_holds_in_ci_only(
    percent: float, environment: dict[str, str], status: int
) -> None:
    assert exit_status(percent, 92, environment) == status


def test_the_report_names_ten_files_those_with_most_missed_lines_first() -> None:
    files = {
        f"{missing}.py": {"summary": {"missing_lines": missing, "num_statements": 100}}
        for missing in range(12)
    }
    totals = {"percent_covered": 94.5, "num_statements": 1200}
    first, *rest = summary({"totals": totals, "files": files}, ["units", "servers"], 92.0)
    assert first == "coverage 94.5 %, 1200 lines (units, servers); the floor is 92 %"
    assert [line.split()[-1] for line in rest] == [f"{missing}.py" for missing in range(11, 1, -1)]
