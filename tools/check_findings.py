"""Run the tests that docs/findings.md names on commit 5f474b0 and on today's code.

    python tools/check_findings.py [--finding A1 ...] [--first-only] [--json FILE]

Today's tests run on the sources of both commits. On the old commit a test *passes*, *fails*, or
*cannot run*: an import, an attribute, an argument or a setting is missing there, so its failure
proves nothing.

The exit status is 1 if the page names a test that does not exist, if a test of a finding's first
list does not fail there and pass here, or if a finding has no such test. Tests that need vLLM are
skipped without it, and then the exit status is 1.

The first lists take some four minutes, all tests half an hour. The old commit is checked out into a
temporary worktree. Each file of tests runs in one process on each commit. A test without an answer
within `--limit-s` has failed.
"""

import argparse
import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "findings.md"
COMMIT = "5f474b0"
FINDINGS = [
    *(f"A{n}" for n in range(1, 7)),
    *(f"B{n}" for n in range(1, 7)),
    *(f"C{n}" for n in range(1, 11)),
]
PROVES, KEEPS = f"Fails on {COMMIT}", "More tests"

PASSED, FAILED, CANNOT_RUN, SKIPPED, MISSING = (
    "passed",
    "failed",
    "cannot run",
    "skipped",
    "missing",
)
_WORST_FIRST = (FAILED, CANNOT_RUN, MISSING, SKIPPED, PASSED)
_REPORT = "CHECK_FINDINGS_REPORT"
_START_S = 120.0
_LONGEST_REASON = 160


@dataclass
class Finding:
    """proves: tests that fail on the old commit for the finding's own reason; keeps: all others"""

    id: str
    title: str
    proves: list[str] = field(default_factory=list)
    keeps: list[str] = field(default_factory=list)


@dataclass
class Result:
    """The result of a class or of several parameters is the worst one."""

    result: str
    reason: str = ""


@dataclass
class Row:
    """One test of one finding on both commits."""

    finding: str
    test: str
    proves: bool
    old: Result
    now: Result

    @property
    def shows_it(self) -> bool:
        return self.old.result == FAILED and self.now.result == PASSED


def read_page(text: str) -> list[Finding]:
    found = []
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        number, _, title = heading.partition(": ")
        finding = Finding(number, title)
        current: list[str] = []
        for line in body.splitlines():
            if line.startswith("- "):
                label = line[2:]
                current = (
                    finding.proves
                    if label.startswith(PROVES)
                    else finding.keeps
                    if label.startswith(KEEPS)
                    else []
                )
            current += re.findall(r"`(tests/[^`]+\.py::[^`]+)`", line)
        found.append(finding)
    return found


def exists(test: str) -> bool:
    path, *names = test.split("::")
    if not (ROOT / path).is_file():
        return False
    body: Sequence[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for name in names:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        node = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
        if node is None:
            return False
        body = node.body
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--finding", nargs="+", metavar="ID", choices=FINDINGS, default=FINDINGS, help="these alone"
    )
    parser.add_argument(
        "--first-only", action="store_true", help=f"only the tests under '{PROVES}'"
    )
    parser.add_argument(
        "--limit-s", type=int, default=600, help="time for one test; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    options = parser.parse_args(arguments)
    # so that the worktree is removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    findings = [finding for finding in read_page(PAGE.read_text()) if finding.id in options.finding]
    wanted = {
        test
        for finding in findings
        for test in (finding.proves if options.first_only else finding.proves + finding.keeps)
    }
    there = sorted(test for test in wanted if exists(test))
    with tempfile.TemporaryDirectory(prefix="kvf-") as scratch, old_worktree(Path(scratch)) as old:
        if not options.first_only:
            subprocess.run(
                [sys.executable, "tools/compile_kernels.py"],
                cwd=old,
                env=_environ(old / "src"),
                check=True,
            )
        now, before = (
            Runner(sources, Path(scratch), options.limit_s).run(there)
            for sources in (ROOT / "src", old / "src")
        )
    missing = Result(MISSING, "it does not exist")
    rows = [
        Row(
            finding.id,
            test,
            test in finding.proves,
            before.get(test, missing),
            now.get(test, missing),
        )
        for finding in findings
        for test in finding.proves + finding.keeps
        if test in wanted
    ]
    show(rows)
    wrong = complaints(rows, options.finding)
    if options.json is not None:
        content = {
            "commit": COMMIT,
            "rows": [asdict(row) | {"shows_it": row.shows_it} for row in rows],
            "wrong": wrong,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(
        "\n".join(wrong)
        or f"each of {len(findings)} findings has a test that fails on {COMMIT} for its "
        "reason and passes now"
    )
    return bool(wrong)


def show(rows: Sequence[Row]) -> None:
    """`*` marks tests of a finding's first list."""
    print(f"{'finding':8} {'on ' + COMMIT:12} {'now':12} test")
    for row in rows:
        print(
            f"{row.finding + ('*' if row.proves else ''):8} {row.old.result:12} "
            f"{row.now.result:12} {row.test}"
        )
        for when, result in (("there", row.old), ("now", row.now)):
            if result.reason:
                print(f"{'':34} {when}: {result.reason}")


def complaints(rows: Sequence[Row], findings: Sequence[str]) -> list[str]:
    """The errors of page and code, a line each."""
    wrong = [
        f"{row.finding}: {row.test}: {row.now.reason}" for row in rows if row.now.result == MISSING
    ]
    wrong += [
        f"{row.finding}: {row.test} must fail on {COMMIT} for a reason that proves "
        "something, and pass now: "
        f"{row.old.result} there, {row.now.result} now"
        for row in rows
        if row.proves and not row.shows_it and MISSING not in (row.old.result, row.now.result)
    ]
    shown = {row.finding for row in rows if row.proves and row.shows_it}
    return wrong + [
        f"{finding}: no test of its fails on {COMMIT} for its reason and passes now"
        for finding in findings
        if finding not in shown
    ]


@contextmanager
def old_worktree(scratch: Path) -> Iterator[Path]:
    folder = scratch / "old"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(folder), COMMIT], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False)


@dataclass(frozen=True)
class Runner:
    sources: Path
    scratch: Path
    limit_s: int
    root: Path = ROOT

    def run(self, tests: Sequence[str]) -> dict[str, Result]:
        results: dict[str, Result] = {}
        files: dict[str, list[str]] = {}
        for test in tests:
            files.setdefault(test.partition("::")[0], []).append(test)
        for file, listed in files.items():
            print(f"{self.sources}: {file}", file=sys.stderr, flush=True)
            results |= self._run_file(file, listed)
        return results

    def _run_file(self, file: str, listed: Sequence[str]) -> dict[str, Result]:
        """Use one process; after a test that hangs, a new one."""
        items: dict[str, Result] = {}
        left = list(listed)
        while left:
            lines, ending = self._run_pytest(left)
            for line in lines:
                before = items.get(line["item"])
                # a teardown may fail after the test
                if "result" in line and (before is None or before.result in (PASSED, SKIPPED)):
                    items[line["item"]] = Result(line["result"], line["reason"])
            unfinished = next((line["item"] for line in lines if line["item"] not in items), None)
            if unfinished is None:
                break
            items[unfinished] = Result(FAILED, ending)
            left = [test for test in left if not any(_is_of(item, test) for item in items)]
        collected = items.get(file)  # the file could not be imported
        return {
            test: collected
            or _joined([result for item, result in items.items() if _is_of(item, test)])
            for test in listed
        }

    def _run_pytest(self, tests: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        report, output, folder = (
            self.scratch / "report",
            self.scratch / "output",
            Path(tempfile.mkdtemp(dir=self.scratch)),
        )
        report.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tools.check_findings",
            "-p",
            "no:cacheprovider",
            "-q",
            f"--basetemp={folder}/t",
        ]
        command += [f"--timeout={self.limit_s}", "--timeout-method=signal", *tests]
        environ = _environ(self.sources) | {_REPORT: str(report)}
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environ,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            ending = (
                "the process of the test ended with status "
                f"{process.wait(_START_S + self.limit_s * len(tests))}"
            )
        except subprocess.TimeoutExpired:
            ending = f"no answer within {self.limit_s} s"
        finally:
            _end(process, folder)
        said = output.read_text(errors="replace")
        if "while loading conftest" in said:
            reason = _line(re.findall(r"^E +(.+)$", said, re.MULTILINE)[-1])
            return [
                {"item": tests[0].partition("::")[0], "result": CANNOT_RUN, "reason": reason}
            ], ending
        lines = (
            [json.loads(line) for line in report.read_text().splitlines()]
            if report.exists()
            else []
        )
        if not lines or lines[0] != {"sources": str(self.sources)}:
            raise SystemExit(f"pytest did not run on {self.sources}:\n{said[-3000:]}")
        return lines[1:], ending


def _is_of(item: str, test: str) -> bool:
    return item == test or item.startswith((f"{test}::", f"{test}["))


def _joined(results: Sequence[Result]) -> Result:
    if not results:
        return Result(MISSING, "pytest ran no such test")
    worst = min((result.result for result in results), key=_WORST_FIRST.index)
    same = [result for result in results if result.result == worst]
    reason = next((result.reason for result in same if result.reason), "")
    return Result(
        worst,
        reason if len(results) == 1 or not reason else f"{len(same)} of {len(results)}: {reason}",
    )


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for left in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join(left.cmdline()):
                left.kill()


def _environ(sources: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")}
    return kept | {"PYTHONPATH": f"{sources}{os.pathsep}{ROOT}"}


# In the process of pytest, whose plugin this file is.


def pytest_configure(config: pytest.Config) -> None:
    import kvhold

    config.pluginmanager.register(
        Recorder(Path(os.environ[_REPORT]), Path(kvhold.__file__).parents[1])
    )


class Recorder:
    """Writes a line for each test that begins, and for each that ends, with the reason."""

    def __init__(self, file: Path, sources: Path) -> None:
        self._file = file
        self._write(sources=str(sources))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(item=nodeid, begun=True)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: "pytest.CallInfo[None]"
    ) -> Iterator[None]:
        """After a test's setup, call or teardown."""
        outcome: Any = yield
        report: pytest.TestReport = outcome.get_result()
        if report.skipped:
            self._write(
                item=item.nodeid,
                result=SKIPPED,
                reason=_line(str(call.excinfo and call.excinfo.value)),
            )
        elif report.failed:
            assert call.excinfo is not None
            self._write(
                item=item.nodeid,
                **asdict(why_failed(call.excinfo, report.longreprtext, report.when)),
            )
        elif report.when == "call":
            self._write(item=item.nodeid, result=PASSED, reason="")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            errors = [
                line[1:].strip()
                for line in report.longreprtext.splitlines()
                if re.match(r"E  +\w", line)
            ]
            self._write(item=report.nodeid, begun=True)
            self._write(
                item=report.nodeid,
                result=CANNOT_RUN,
                reason=_line(errors[-1] if errors else report.longreprtext),
            )
        elif report.skipped:
            self._write(item=report.nodeid, result=SKIPPED, reason=_line(str(report.longrepr)))

    def _write(self, **values: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(values) + "\n")


_LACKS = re.compile(
    r"ModuleNotFoundError: No module named 'kvhold[^\n]*|ImportError: cannot import name "
    r"[^\n]*'kvhold[^\n]*|No such (option|command)[^\n]*"
)
_WRONG_CALL = re.compile(
    r"unexpected keyword argument|positional argument|required keyword-only argument"
)


def why_failed(caught: "pytest.ExceptionInfo[BaseException]", text: str, when: str) -> Result:
    """Whether a failure is valid, or comes from a missing interface. text: pytest's account"""
    error = caught.value
    # without pytest's explanation of an assert
    said = "\n".join(line for line in str(error).splitlines() if not line.startswith(" "))
    shown = _line(f"{'' if when == 'call' else f'in {when}: '}{type(error).__name__}: {said}")
    if timeout := re.search(r"Timeout \(>([\d.]+)s\)", str(error)):
        return Result(FAILED, f"no answer within {float(timeout[1]):g} s")
    lacking = (
        (isinstance(error, ImportError) and "kvhold" in f"{error.name} {error}")
        or (isinstance(error, AttributeError) and (_is_ours(error.obj) or "kvhold" in str(error)))
        or (isinstance(error, TypeError) and _WRONG_CALL.search(str(error)))
        or (
            type(error).__name__ == "ConfigError"
            and "there is no setting" in str(error)
            and not str(error).startswith("environment")
        )
    )
    if lacking:
        return Result(CANNOT_RUN, shown)
    if in_child := _LACKS.search(text):
        return Result(CANNOT_RUN, _line(f"in a process of the test: {in_child[0]}"))
    return Result(FAILED, shown)


def _is_ours(owner: Any) -> bool:
    """Whether it is of kvhold, or a stand-in in a test."""
    name = (
        owner.__name__
        if inspect.ismodule(owner)
        else (owner if inspect.isclass(owner) else type(owner)).__module__
    )
    return name.split(".")[0] in ("kvhold", "tests") or isinstance(owner, SimpleNamespace)


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


if __name__ == "__main__":
    sys.exit(main())
