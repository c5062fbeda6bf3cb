"""Run pytest. Failed tests run once more, alone; those that pass then are printed as flaky.

    python tools/run_tests.py units -m 'not vllm' -n 2 --dist loadfile
    python tools/run_tests.py --measure units -m 'not vllm' -n 2 --dist loadfile

The first argument names the stage. A flaky test is a defect to be mended. More than a few failures
end the run at once.

`--measure` writes the executed lines, of child processes too, to `.coverage/STAGE/`, for
`tools/report_coverage.py`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_MOST_FLAKY = 3
_TESTS_FAILED = 1  # pytest's exit status
_SETTINGS = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main(arguments: list[str]) -> int:
    measure = arguments[0] == "--measure"
    stage, *arguments = arguments[measure:]
    data = _empty_folder(Path(".coverage", stage).absolute()) / "data" if measure else None
    with tempfile.TemporaryDirectory(prefix="kvhold-tests-") as folder:
        status = _pytest(folder, arguments, data)
        failed = _last_failed(Path(folder)) if status == _TESTS_FAILED else []
        if not 0 < len(failed) <= _MOST_FLAKY:
            return status
        print(f"\n=== {stage}: {len(failed)} failed, once more and alone ===", flush=True)
        status = _pytest(folder, failed, data)
    if status == 0:
        print("\n".join(f"FLAKY {stage}: {name}" for name in failed), flush=True)
    return status


def _pytest(folder: str, arguments: list[str], data: Path | None) -> int:
    measured = ["coverage", "run", f"--rcfile={_SETTINGS}", "-m"] if data else []
    command = [sys.executable, "-m", *measured, "pytest", "-o", f"cache_dir={folder}", *arguments]
    environment = os.environ | {"COVERAGE_FILE": str(data)} if data else None
    return subprocess.run(command, env=environment, check=False).returncode


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _last_failed(folder: Path) -> list[str]:
    try:
        return sorted(json.loads((folder / "v/cache/lastfailed").read_text()))
    except (OSError, ValueError):
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
