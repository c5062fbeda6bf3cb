"""Print how much of kvhold's source the measured tests ran, and fail below the floor.

    python tools/report_coverage.py parts sglang             # stages, as `make test` measures them
    python tools/report_coverage.py units --part cache       # the missed lines of one package

`tools/run_tests.py --measure` writes the data to `.coverage/`. The floor, `fail_under` in
pyproject.toml, holds in CI only: elsewhere Redis or another program may be missing.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coverage import Coverage

_REPOSITORY = Path(__file__).resolve().parent.parent
_MOST_FILES = 10


def main() -> int:
    """Return 1 below the floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="+", help="folders in .coverage/")
    parser.add_argument("--part", help="a package of kvhold, such as cache; the lines are named")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="kvhold-coverage-") as scratch:
        measured = Coverage(
            config_file=str(_REPOSITORY / "pyproject.toml"), data_file=str(Path(scratch, "data"))
        )
        measured.combine([str(Path(".coverage", stage)) for stage in options.stages], keep=True)
        if options.part:
            measured.report(include=f"*/kvhold/{options.part}/*", show_missing=True)
            return 0
        written = Path(scratch, "report.json")
        measured.json_report(outfile=str(written))
        report = json.loads(written.read_text())

    floor = float(str(measured.get_option("report:fail_under")))
    print("\n".join(summary(report, options.stages, floor)))
    return exit_status(report["totals"]["percent_covered"], floor, os.environ)


def exit_status(percent: float, floor: float, environment: Mapping[str, str]) -> int:
    return 1 if environment.get("CI") and percent < floor else 0


def summary(report: dict[str, Any], stages: list[str], floor: float) -> list[str]:
    """The percentage, and the files with the most missed lines."""
    totals = report["totals"]
    files = sorted(
        ((file["summary"], name) for name, file in report["files"].items()),
        key=lambda one: -one[0]["missing_lines"],
    )
    share = f"{totals['percent_covered']:.1f} %, {totals['num_statements']} lines"
    return [
        f"coverage {share} ({', '.join(stages)}); the floor is {floor:g} %",
        *(
            f"  {file['missing_lines']:4} of {file['num_statements']:4} lines missed: {name}"
            for file, name in files[:_MOST_FILES]
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
