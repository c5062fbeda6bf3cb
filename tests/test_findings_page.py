"""The page of findings names each finding, and tests that exist.

The tool that runs them tells failures that prove nothing from others.
"""

import ast
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhold.core import layout
from kvhold.core.config import load_config
from tools import check_findings
from tools.check_findings import (
    CANNOT_RUN,
    FAILED,
    FINDINGS,
    MISSING,
    PASSED,
    SKIPPED,
    Finding,
    Result,
    Row,
    Runner,
    complaints,
    exists,
    read_page,
    why_failed,
)

PAGE = read_page(check_findings.PAGE.read_text())


def test_every_finding_has_its_section() -> None:
    assert [finding.id for finding in PAGE] == FINDINGS


@pytest.mark.parametrize("finding", PAGE, ids=lambda finding: finding.id)
def test_every_test_that_is_named_exists_and_one_of_them_proves_the_finding(
    finding: Finding,
) -> None:
    assert finding.proves
    assert [test for test in finding.proves + finding.keeps if not exists(test)] == []
    assert len(set(finding.proves + finding.keeps)) == len(finding.proves + finding.keeps)


SHARED = [*sorted((check_findings.ROOT / "tests/findings").glob("*.py"))]
SHARED += [
    check_findings.ROOT / "tests" / name
    for name in ("vllm/scheduling.py", "vllm/hands.py", "tiers/memory.py", "cache/below.py")
]


def on_old_commit(module: str) -> str | None:
    """The source of a module of kvhold's there; None where it does not exist."""
    path = f"src/{module.replace('.', '/')}"
    for name in (f"{path}.py", f"{path}/__init__.py"):
        command = ["git", "-C", str(check_findings.ROOT), "show", f"{check_findings.COMMIT}:{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
    return None


@pytest.mark.parametrize("file", SHARED, ids=lambda file: file.name)
def test_what_tests_of_findings_import_is_on_the_old_commit_too(file: Path) -> None:
    if on_old_commit("kvhold") is None:
        pytest.skip("this checkout has no history")
    imports = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    for node in imports:
        if (module := node.module or "").split(".")[0] == "kvhold":
            there = on_old_commit(module)
            assert there is not None, module
            missing = [
                name.name
                for name in node.names
                if name.name not in there and on_old_commit(f"{module}.{name.name}") is None
            ]
            assert missing == [], module


def test_what_closes_a_finding_is_said_for_each() -> None:
    sections = check_findings.PAGE.read_text().split("\n### ")[1:]
    assert [
        section.partition(":")[0]
        for section in sections
        if "\n- Was: " not in section or "\n- Closed by: " not in section
    ] == []


def test_a_test_that_does_not_exist_is_noticed() -> None:
    here = "tests/test_findings_page.py"
    assert exists(f"{here}::test_every_finding_has_its_section")
    assert exists(
        "tests/findings/test_reliability.py::TestC7::test_the_index_of_a_disk_takes_few_bytes_a_value"
    )
    for name in (
        f"{here}::test_nothing",
        "tests/nowhere.py::test_x",
        f"{here}::PAGE",
        "tests/findings/test_reliability.py::TestC7::test_x",
    ):
        assert not exists(name)


@pytest.mark.parametrize(
    ("act", "result"),
    [
        (lambda: __import__("kvhold.no_such_module"), CANNOT_RUN),
        (lambda: layout.NoSuchClass, CANNOT_RUN),  # type: ignore[attr-defined]
        (lambda: load_config(no_such_argument=1), CANNOT_RUN),  # type: ignore[call-arg]
        (lambda: load_config(1, 2), CANNOT_RUN),  # type: ignore[call-arg, arg-type]
        (lambda: load_config({"no_such_setting": 1}, environ={}), CANNOT_RUN),
        (lambda: pytest.MonkeyPatch().setattr(layout, "no_such_name", 1), CANNOT_RUN),
        (lambda: types.SimpleNamespace().missing, CANNOT_RUN),
        (
            lambda: pytest.fail(
                "said by a child: ImportError: cannot import name 'x' from 'kvhold.net' (y)"
            ),
            CANNOT_RUN,
        ),
        (lambda: load_config(environ={"KVHOLD_SERVICE_HOSTS": "x"}), FAILED),
        (lambda: pytest.fail("Timeout (>5.0s) from pytest-timeout."), FAILED),
        (lambda: pytest.fail("1 != 2"), FAILED),
        (lambda: "text".missing, FAILED),  # type: ignore[attr-defined]
        (lambda: len(5), FAILED),  # type: ignore[arg-type]
    ],
)
def test_failures_for_a_missing_interface_are_told_from_others(
    act: Callable[[], Any], result: str
) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of whatever kind
        act()
    assert why_failed(caught, str(caught.value), "call").result == result


@pytest.mark.parametrize(
    ("old", "now", "wrong"),
    [
        (FAILED, PASSED, []),
        (PASSED, PASSED, ["passed there, passed now", "no test of its fails"]),
        (CANNOT_RUN, PASSED, ["cannot run there, passed now", "no test of its fails"]),
        (FAILED, FAILED, ["failed there, failed now", "no test of its fails"]),
        (FAILED, SKIPPED, ["failed there, skipped now", "no test of its fails"]),
        (MISSING, MISSING, ["does not exist", "no test of its fails"]),
    ],
)
def test_a_finding_needs_a_test_that_fails_there_and_passes_here(
    old: str, now: str, wrong: list[str]
) -> None:
    found = complaints(
        [
            Row(
                "A1",
                "test",
                True,
                Result(old, "it does not exist"),
                Result(now, "it does not exist"),
            )
        ],
        ["A1"],
    )
    assert len(found) == len(wrong)
    assert all(part in line for part, line in zip(wrong, found, strict=True))


def test_other_tests_of_a_finding_may_fail_there_or_not(tmp_path: Path) -> None:
    rows = [Row("A1", "test", True, Result(FAILED), Result(PASSED))]
    for old in (PASSED, FAILED, CANNOT_RUN):
        assert (
            complaints([*rows, Row("A1", "other", False, Result(old), Result(PASSED))], ["A1"])
            == []
        )


def test_results_are_written_as_pytest_has_them(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, time\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_two(n): assert n == 1\n"
        "def test_hangs(): time.sleep(600)\n"
        "def test_right(): pass\n"
        "@pytest.fixture\n"
        "def broken():\n    yield\n    raise OSError('left behind')\n"
        "def test_broken(broken): pass\n"
        "def test_skipped(): pytest.skip('not here')\n"
    )
    (tmp_path / "scratch").mkdir()
    names = [f"test_it.py::test_{name}" for name in ("two", "hangs", "right", "broken", "skipped")]
    found = Runner(check_findings.ROOT / "src", tmp_path / "scratch", 1, tmp_path).run(names)
    assert [(found[name].result, found[name].reason) for name in names] == [
        (FAILED, "1 of 2: AssertionError: assert 2 == 1"),
        (FAILED, "no answer within 1 s"),
        (PASSED, ""),
        (FAILED, "in teardown: OSError: left behind"),
        (SKIPPED, "not here"),
    ]
