"""Runs many seeds on all cores, or checks that the seeds find each mutation.

PYTHONHASHSEED is 0, because the order of a set of bytes is part of a history.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvhold
from kvhold.core.errors import KVHoldError
from kvhold_lab.simulation.patches import apply, mutations

_PIECE = 500  # seeds per process, which takes a second to start
_SHOWN = 20


class SimulationError(KVHoldError):
    """A simulation's process ended before its seeds did."""


@dataclass
class SimulationResult:
    """findings: number of seeds with a finding; found: the first of them, with replay commands"""

    seeds: int = 0
    operations: int = 0
    findings: int = 0
    seconds: float = 0.0
    found: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.seeds > 0 and not self.findings


@dataclass(frozen=True)
class MutationRow:
    mutation: str
    found: bool
    seed: int | None
    what: str = ""


@dataclass(frozen=True)
class MutationsResult:
    rows: list[MutationRow]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.found for row in self.rows)


def run(
    seeds: int, first: int, *, hosts: int = 0, tell: Callable[[str], None] = lambda _: None
) -> SimulationResult:
    """Run seeds.

    hosts: simulate this many hosts, which are each other's peers; 0: what each seed says
    tell:  called with each of the first findings

    Raises SimulationError.
    """
    began_s, result = time.monotonic(), SimulationResult()
    pieces = [(at, min(_PIECE, first + seeds - at)) for at in range(first, first + seeds, _PIECE)]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        for lines in pool.map(lambda piece: list(_lines(_source(), *piece, hosts=hosts)), pieces):
            for line in lines:
                if "finding" in line:
                    result.findings += 1
                    found = line["finding"] | {
                        "replay": f"kvhold bench soak simulation --first {line['finding']['seed']} "
                        f"--seeds 1 --trace{f' --hosts {hosts}' if hosts else ''}"
                    }
                    if len(result.found) < _SHOWN:
                        result.found.append(found)
                        tell(json.dumps(found))
                else:
                    result.seeds += line["seeds"]
                    result.operations += line["operations"]
    result.seconds = round(time.monotonic() - began_s, 1)
    return result


def trace(seed: int, *, hosts: int = 0) -> int:
    """Return the exit status of the seed's process."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "kvhold_lab.simulation.worker",
        str(seed),
        "1",
        "--trace",
        *_hosts(hosts),
    ]
    return subprocess.run(command, env=_environment(_source()), check=False).returncode


def run_mutations(
    most_seeds: int,
    first: int = 1,
    *,
    names: tuple[str, ...] = (),
    hosts: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> MutationsResult:
    """Apply each mutation to a copy of the code, and simulate seeds until one finds it.

    names: only these, also rare ones; by default all but the rare ones
    hosts: see `run`

    Raises PatchError, SimulationError.
    """
    patches = (
        [path for path in mutations(rare=True) if path.stem in names] if names else mutations()
    )

    def find(patch: Path) -> MutationRow:
        row = _find_mutation(patch, first, most_seeds, hosts)
        tell(
            f"{row.mutation}: "
            f"{f'found by seed {row.seed}: {row.what}' if row.found else 'not found'}"
        )
        return row

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        return MutationsResult(list(pool.map(find, patches)))


def _find_mutation(patch: Path, first: int, most_seeds: int, hosts: int) -> MutationRow:
    with tempfile.TemporaryDirectory(prefix="kvhold-mutation-") as folder:
        shutil.copytree(
            _source() / "kvhold",
            Path(folder) / "kvhold",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        apply(patch, Path(folder))
        for line in _lines(Path(folder), first, most_seeds, hosts=hosts, until_found=True):
            if "finding" in line:
                return MutationRow(
                    patch.stem, True, line["finding"]["seed"], line["finding"]["what"][0][:200]
                )
    return MutationRow(patch.stem, False, None)


def _lines(
    source: Path, first: int, count: int, *, hosts: int = 0, until_found: bool = False
) -> Iterator[dict[str, Any]]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "kvhold_lab.simulation.worker",
        str(first),
        str(count),
        *_hosts(hosts),
    ]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=_environment(source), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for text in process.stdout:
                line = json.loads(text)
                yield line
                if until_found and "finding" in line:
                    return
        finally:
            process.kill() if until_found else process.wait()
        if process.wait() != 0 and not until_found:
            errors.seek(0)
            raise SimulationError(
                f"the process of the seeds from {first} on failed: {errors.read()[-2000:]}"
            )


def _hosts(hosts: int) -> list[str]:
    return ["--hosts", str(hosts)] if hosts else []


def _source() -> Path:
    return Path(kvhold.__file__).parents[1]


def _environment(source: Path) -> dict[str, str]:
    lab = Path(__file__).parents[2]
    return os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (source, lab))),
    }
