"""Runs many seeds on all cores. PYTHONHASHSEED is 0: a set's order is part of a history."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import kvhold
from kvhold.core.errors import KVHoldError
from kvhold_lab.simulation.patches import apply, mutations

_MODULE = "kvhold_lab.simulation.worker"
_PIECE = 50  # seeds at once, divided by the hosts
_MOST_SEEDS = 2000  # of one process
_SHOWN = 20


class SimulationError(KVHoldError): ...


@dataclass
class SimulationResult:
    """findings: seeds with one; found: the first"""

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
    """hosts: 0: by each seed
    tell:  called with each of the first findings

    Raises SimulationError.
    """
    began_s, result = time.monotonic(), SimulationResult()
    size = max(1, _PIECE // max(1, hosts))
    pieces = [(at, min(size, first + seeds - at)) for at in range(first, first + seeds, size)]
    with _Workers(hosts) as workers, ThreadPoolExecutor(_num_cores()) as pool:
        for lines in pool.map(lambda piece: workers.lines(*piece), pieces):
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
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        _MODULE,
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
    """Run seeds with each mutation, until one finds it.

    names: by default all but the rare ones

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

    with ThreadPoolExecutor(_num_cores()) as pool:
        return MutationsResult(list(pool.map(find, patches)))


def _find_mutation(patch: Path, first: int, most_seeds: int, hosts: int) -> MutationRow:
    with tempfile.TemporaryDirectory(prefix="kvhold-mutation-") as folder:
        shutil.copytree(_source() / "kvhold", Path(folder) / "kvhold")
        apply(patch, Path(folder))
        for line in _lines(Path(folder), first, most_seeds, hosts=hosts):
            if "finding" in line:
                return MutationRow(
                    patch.stem, True, line["finding"]["seed"], line["finding"]["what"][0][:200]
                )
    return MutationRow(patch.stem, False, None)


class _Worker:
    def __init__(self, source: Path, hosts: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", _MODULE, *_hosts(hosts)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            command,
            env=_environment(source),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.num_seeds = 0
        self._is_idle = True

    def lines(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        self.num_seeds += count
        self._is_idle = False
        asked, said = self._process.stdin, self._process.stdout
        assert asked is not None
        assert said is not None
        with suppress(BrokenPipeError):
            asked.write(f"{first} {count}\n")
            asked.flush()
        for text in said:
            line = json.loads(text)
            if "done" in line:
                self._is_idle = True
                return
            yield line
        self._process.wait()
        self._errors.seek(0)
        raise SimulationError(
            f"the process of the seeds from {first} on failed: {self._errors.read()[-2000:]}"
        )

    def end(self) -> None:
        if not self._is_idle:
            self._process.kill()
        with self._process, self._errors:
            assert self._process.stdin is not None
            self._process.stdin.close()


class _Workers:
    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        self._all: list[_Worker] = []

    def __enter__(self) -> Self:
        for _ in range(_num_cores()):
            self._idle.put(None)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.end()

    def lines(self, first: int, count: int) -> list[dict[str, Any]]:
        """Any thread. Raises SimulationError."""
        worker = self._idle.get()
        try:
            if worker is None or worker.num_seeds >= _MOST_SEEDS:
                if worker is not None:
                    worker.end()
                worker = _Worker(_source(), self._hosts)
                self._all.append(worker)
            return list(worker.lines(first, count))
        finally:
            self._idle.put(worker)


def _lines(source: Path, first: int, count: int, *, hosts: int = 0) -> Iterator[dict[str, Any]]:
    worker = _Worker(source, hosts)
    try:
        yield from worker.lines(first, count)
    finally:
        worker.end()


def _num_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


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
