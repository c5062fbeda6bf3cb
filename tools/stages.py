"""Time the stages of `make test`, and print the times at its end.

python tools/stages.py run simulation kvhold bench soak simulation --seeds 2000
python tools/stages.py report
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TIMES = Path("build", "stages.tsv")


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of the stage's command."""
    match arguments:
        case ["run", name, *command] if command:
            return _run(name, command)
        case ["report"]:
            _report()
            return 0
    print(__doc__, file=sys.stderr)
    return 2


def _run(name: str, command: Sequence[str]) -> int:
    began_s = time.monotonic()
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        TIMES.parent.mkdir(exist_ok=True)
        with TIMES.open("a") as times:
            times.write(f"{time.monotonic() - began_s:.0f}\t{name}\n")


def _report() -> None:
    rows = [line.split("\t") for line in TIMES.read_text().splitlines()]
    for seconds, name in rows:
        print(f"{seconds:>6} s  {name}")
    print(f"{sum(int(seconds) for seconds, _ in rows):>6} s  together; some ran at the same time")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
