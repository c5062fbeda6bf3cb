import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median

import click
import msgspec

from kvhold.core.errors import UNDECODABLE, ConfigError

DEFAULT_FILE = Path("benchmarks") / "history.jsonl"
_MOST_BYTES = 64 << 20
_MOST_COLUMNS = 8


class KeptRow(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str = ""
    ratio: float | None = None

    @property
    def shown(self) -> float:
        return self.value if self.ratio is None else self.ratio


class KeptRun(msgspec.Struct, frozen=True):
    """at: UTC, ISO 8601; commit: "" if unknown, "+" for changed files"""

    at: str
    commit: str
    machine: str
    rows: list[KeptRow]


@click.command("history")
@click.option(
    "--add",
    "results",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Keep the rows of this --json file of another benchmark; may be repeated.",
)
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_FILE,
    show_default=True,
    help="File of the kept runs, one a line.",
)
@click.option(
    "--name", "pattern", default="*", help="Only rows whose names match this shell pattern."
)
@click.option(
    "--last",
    type=click.IntRange(1),
    default=_MOST_COLUMNS,
    show_default=True,
    help="Runs to show of each row.",
)
def command(results: tuple[Path, ...], file: Path, pattern: str, last: int) -> None:
    """Keep results with machine and commit, and show their changes.

    `change` is the last run divided by the median of the earlier runs.
    """
    if results:
        runs = [_run_of(path) for path in results]
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as out:
            out.writelines(msgspec.json.encode(run) + b"\n" for run in runs)
        click.echo(f"{sum(len(run.rows) for run in runs)} rows were added to {file}")
    lines = table(read(file), pattern, last)
    click.echo("\n".join(lines) if lines else f"{file} has no such rows")


def read(file: Path) -> list[KeptRun]:
    if not file.exists():
        return []
    if file.stat().st_size > _MOST_BYTES:
        raise ConfigError(f"{file} is larger than {_MOST_BYTES >> 20} MiB: name another --file")
    runs = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            runs.append(msgspec.json.decode(line, type=KeptRun))
        except UNDECODABLE as error:
            raise ConfigError(f"{file}, line {number}: no run of a benchmark: {error}") from None
    return runs


def table(runs: Sequence[KeptRun], pattern: str, last: int) -> list[str]:
    series: dict[tuple[str, str], list[tuple[str, KeptRow]]] = {}
    for run in runs:
        for row in run.rows:
            if fnmatchcase(row.name, pattern):
                series.setdefault((run.machine, row.name), []).append((run.commit, row))
    lines: list[str] = []
    machine = ""
    for (of, name), kept in sorted(series.items()):
        if of != machine:
            machine = of
            lines += ["", machine] if lines else [machine]
        *earlier, (_, newest) = kept
        usual = median(row.shown for _, row in earlier) if earlier else 0.0
        change = f"{newest.shown / usual:7.3f}" if usual else "      -"
        unit = newest.unit if newest.ratio is None else "of its limit"
        shown = "  ".join(f"{commit[:8] or '-'} {row.shown:.3g}" for commit, row in kept[-last:])
        lines.append(f"  {name:40.40} {unit:12} change {change}  {shown}")
    return lines


def _run_of(path: Path) -> KeptRun:
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[KeptRow])
    except UNDECODABLE as error:
        raise ConfigError(
            f"{path}: not the --json file of a benchmark with names and values: {error}"
        ) from None
    return KeptRun(datetime.now(UTC).isoformat(timespec="seconds"), _commit(), _machine(), rows)


def _commit() -> str:
    try:
        head, changed = (
            subprocess.run(
                ["git", *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head[:12] + ("+" if changed else "")


def _machine() -> str:
    model = platform.machine()
    try:
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
