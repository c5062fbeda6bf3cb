"""A run that hangs where no test's limit counts ends, and says where."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
import sys, time, pytest
sys.path.insert(0, {root!r})
from tests.silence import SilenceWatch, hands_out_tests

def pytest_configure(config):
    if hands_out_tests(config):
        config.pluginmanager.register(SilenceWatch({silent_s}))

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if item.name == "test_hangs":
        time.sleep(600)  # before the test's timer begins
    return (yield)
"""
TESTS = """
import time

def test_right():
    pass

def test_hangs():
    pass

def test_slow():
    time.sleep({slow_s})
"""


def run(folder: Path, *, silent_s: float, slow_s: float, only: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT), silent_s=silent_s))
    (folder / "test_it.py").write_text(TESTS.format(slow_s=slow_s))
    options = ["-q", "-n", "1", "-p", "no:cacheprovider", "--max-worker-restart", "1", "-k", only]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_it.py"],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if "PYTEST" not in k and "COVERAGE" not in k},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_hang_between_two_tests_is_named(tmp_path: Path) -> None:
    status, said = run(tmp_path, silent_s=3, slow_s=0, only="right or hangs")
    assert status == 1
    assert "no test has ended for 3 s" in said
    assert "crashed while running 'test_it.py::test_hangs'" in said
    assert "in pytest_runtest_protocol" in said, "where it hung"
    assert "1 failed, 1 passed" in said


def test_who_reports_is_left_alone(tmp_path: Path) -> None:
    status, said = run(tmp_path, silent_s=60, slow_s=0.5, only="right or slow")
    assert (status, "2 passed" in said) == (0, True), said
