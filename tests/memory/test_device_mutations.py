"""Each event, fence and wait of the copier of devices and of its users, left out in turn: some test
then fails.

A mutation is a replacement in a copy of the source. The tests named with it run over that copy
until one of them fails: those that are known to find it, because a whole file takes minutes.
"""

import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORKER = "tests/vllm/test_worker_device.py"
ORDERS = "tests/memory/test_device.py::test_in_every_order_of_streams_the_bytes_are_right"
TRANSFERS = "tests/memory/test_device_transfers.py::TestTransfer"
OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=120"]
OPTIONS += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
PINNING = "tests/memory/test_device_pinning.py::TestPinning"
ENGINE_ORDERS = f"{WORKER}::test_in_every_order_of_streams_the_bytes_are_right"
COPIER, LAYERWISE, OF_VLLM = (
    "memory/device/copier.py",
    "integrations/vllm/layerwise.py",
    "integrations/vllm/worker.py",
)


@dataclass(frozen=True)
class Mutation:
    """was -> becomes, in a file below src/kvhold. nth: which occurrence, from 0 on. tests: of which
    one must fail.
    """

    name: str
    file: str
    was: str
    becomes: str
    nth: int = 0
    tests: str = ORDERS


MUTATIONS = [
    Mutation(
        "gathers do not wait for the pass",
        COPIER,
        "Lane.GATHER, marks,",
        "Lane.GATHER, [],",
    ),
    Mutation(
        "stores do not wait for the ring to be filled",
        COPIER,
        "Lane.STORE, [read],",
        "Lane.STORE, [],",
    ),
    Mutation(
        "direct stores do not wait for the pass",
        COPIER,
        "copy(Lane.STORE, marks,",
        "copy(Lane.STORE, [],",
    ),
    Mutation(
        "direct loads do not wait for earlier readers",
        COPIER,
        "copy(Lane.LOAD, marks,",
        "copy(Lane.LOAD, [],",
    ),
    Mutation("scatters do not wait for earlier readers", COPIER, "[*marks, read]", "[read]"),
    Mutation("scatters do not wait for the ring to be filled", COPIER, "[*marks, read]", "marks"),
    Mutation("the engine does not wait at a fence", COPIER, "self._driver.hold(event)", "pass"),
    Mutation(
        "a fence forgets gathers by the ring",
        COPIER,
        "transfer.add(touched=read, ended=read)",
        "transfer.add(ended=read)",
    ),
    Mutation(
        "a fence forgets direct gathers",
        COPIER,
        "transfer.add(touched=read, ended=read, summed",
        "transfer.add(ended=read, summed",
    ),
    Mutation(
        "a fence forgets loads",
        COPIER,
        "transfer.add(touched=written, ended=written)",
        "transfer.add(ended=written)",
    ),
    Mutation(
        "a fence forgets checksums of blocks",
        COPIER,
        "touched=event if of_blocks else None,",
        "touched=None,",
        tests=TRANSFERS,
    ),
    Mutation(
        "the ring is taken again before a store has read it",
        COPIER,
        "part.until(event)\n            transfer.add(ended=event, summed",
        "transfer.add(ended=event, summed",
    ),
    Mutation(
        "the ring is taken again before a load has been scattered",
        COPIER,
        "part.until(self._check(",
        "(self._check(",
    ),
    Mutation(
        "nobody waits for stores",
        COPIER,
        "            transfer.add(ended=event, summed=(event, batch, sums))\n",
        "",
    ),
    Mutation(
        "checksums are compared before the device has read",
        COPIER,
        "            event.wait()\n        planned",
        "            pass\n        planned",
        tests=TRANSFERS,
    ),
    Mutation(
        "checksums are taken before the device has written",
        COPIER,
        "            event.wait()\n        planned",
        "            pass\n        planned",
        nth=1,
    ),
    Mutation(
        "checksums are of bytes that have not come", COPIER, "Lane.SUM, [after],", "Lane.SUM, [],"
    ),
    Mutation(
        "a store is forgotten if its checksums cannot be begun",
        COPIER,
        "            transfer.add(ended=written)\n            event",
        "            event",
        tests=TRANSFERS,
    ),
    Mutation(
        "nobody waits for the end",
        COPIER,
        "        for event in self._ends:\n            self._ends_well(event, faults)\n",
        "",
    ),
    Mutation(
        "what failed to be submitted is not waited for",
        COPIER,
        "            transfer.wait()\n            raise\n",
        "            raise\n",
        tests=TRANSFERS,
    ),
    Mutation(
        "an arena is unpinned while it is copied",
        "memory/device/pinning.py",
        "arena.is_ending and not arena.users)",
        "arena.is_ending)",
        tests=PINNING,
    ),
    Mutation(
        "an arena that could not be registered is copied",
        "memory/device/pinning.py",
        "refusal = arena.fault = ",
        "refusal = ",
        tests=PINNING,
    ),
    Mutation(
        "a slice that is being pinned is not waited for",
        "memory/device/pinning.py",
        "return not self.is_pinning and begin",
        "return begin",
        tests=PINNING,
    ),
    Mutation(
        "a slice is pinned while it is copied",
        "memory/device/pinning.py",
        "lambda: not arena.unpinned_copies",
        "lambda: True",
        tests=PINNING,
    ),
    Mutation(
        "chunks in part go through the ring",
        "memory/device/batches.py",
        "is_whole[first:last].all()",
        "is_whole[first:last].any()",
        tests=TRANSFERS,
    ),
    Mutation(
        "pieces lie over two slices",
        "memory/device/batches.py",
        "while reach.pinned:",
        "while False:",
    ),
    Mutation(
        "who waits does not after a fault",
        COPIER,
        "lambda: self._noting_faults(before=False)",
        "self._noting_faults",
        tests=TRANSFERS,
    ),
    Mutation(
        "slices overlap",
        "memory/device/ring.py",
        "return end if end + nbytes <= oldest else None",
        "return end if end + nbytes <= self.nbytes else None",
        tests="tests/memory/test_device_transfers.py::TestRing",
    ),
    Mutation(
        "loads have no mark",
        OF_VLLM,
        "mark = self._copier.mark() if beside else None",
        "mark = None",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "stores have no mark",
        OF_VLLM,
        "mark = self._copier.mark() if reserved and computed else None",
        "mark = None",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "passes have no fence",
        OF_VLLM,
        "self._copier.fence(one",
        "(lambda _: None)(one",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "rooms are committed at once",
        "integrations/vllm/storing.py",
        "        wait_for(reading.transfers)",
        "        pass",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "loads are reported at once",
        OF_VLLM,
        "self._copier.scatter(pieces, after=mark).wait()",
        "(self._copier.scatter(pieces, after=mark), [None] * len(pieces))[1]",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "layers are read before they have come",
        LAYERWISE,
        "self._copier.fence(one.copies[number])",
        "pass",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "layers are loaded into blocks that others read",
        LAYERWISE,
        "one.mark,",
        "None,",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "layers are stored before they are computed",
        LAYERWISE,
        "pieces, self._copier.mark(), layers",
        "pieces, None, layers",
        tests=ENGINE_ORDERS,
    ),
    Mutation(
        "claims end before the copies",
        LAYERWISE,
        "transfer.wait())",
        "[None] * len(pieces[load.request_id]))",
        tests="tests/vllm/test_layerwise.py",
    ),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy for all, so that its modules are compiled once; compiled kernels are copied, too."""
    copy = tmp_path_factory.mktemp("mutations") / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("*.pyc"))
    # by hash: a mutation may be as long as what it replaces, and as old
    compileall.compile_dir(copy, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return copy


class Runs:
    """Runs of pytest over the copy, in forks of one process."""

    def __init__(self, process: "subprocess.Popen[str]", source: Path) -> None:
        self._process = process
        self._source = source
        self._output = source.parent / "output"

    def run(self, tests: str) -> tuple[int, str]:
        """The exit status and the output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "arguments": [*OPTIONS, tests],
            "source": str(self._source),
            "output": str(self._output),
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        assert said.strip().lstrip("-").isdigit(), said + self._process.stdout.read()
        return int(said), self._output.read_text(errors="replace")


@pytest.fixture(scope="module")
def runs(source: Path) -> Iterator[Runs]:
    environ = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.memory.forked_pytest"],
        cwd=ROOT,
        env=environ,  # nobody measures a copy
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Runs(process, source)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_is_left_out_is_found(mutation: Mutation, source: Path, runs: Runs) -> None:
    if "vllm" in mutation.tests and find_spec("vllm") is None:
        pytest.skip("no vLLM in this environment")
    path = source / "kvhold" / mutation.file
    unchanged = path.read_text()
    parts = unchanged.split(mutation.was)
    assert len(parts) > mutation.nth + 1, "the source has changed; change the mutation with it"
    first, second = (
        mutation.was.join(parts[: mutation.nth + 1]),
        mutation.was.join(parts[mutation.nth + 1 :]),
    )
    path.write_text(first + mutation.becomes + second)
    try:
        for _ in range(3):  # threads take part, so a run may miss what the next one finds
            status, output = runs.run(mutation.tests)
            if status:
                break
    finally:
        path.write_text(unchanged)
    assert status == pytest.ExitCode.TESTS_FAILED, output[-3000:]


def test_unchanged_the_tests_pass(runs: Runs) -> None:
    """Else a mutation would be found by anything."""
    status, output = runs.run(PINNING)
    assert status == pytest.ExitCode.OK, output[-3000:]
