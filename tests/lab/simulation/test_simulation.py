"""The simulation itself: it repeats, it finds what is wrong, and its mutations fit the code."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvhold
from kvhold_lab.simulation import soak
from kvhold_lab.simulation.hosts import EVERY
from kvhold_lab.simulation.patches import PatchError, _hunks, apply, mutations


def test_finds_nothing_in_the_first_seeds() -> None:
    result = soak.run(8, 1)  # `make simulation` runs 2,000
    assert result.found == []
    assert result.seeds == 8
    assert result.operations > 8


def histories(*seeds: int, count: int = 1) -> list[list[dict[str, Any]]]:
    """Of `count` seeds from each of `seeds`, in one process."""
    worker = soak._Worker(soak._source(), 0)
    try:
        return [list(worker.lines(seed, count)) for seed in seeds]
    finally:
        worker.end()


def test_a_seed_is_one_history() -> None:
    first, other = histories(7, 8, count=3)
    assert histories(7, count=3) == [first]
    assert first != other


def test_a_seed_of_several_hosts_is_one_history() -> None:
    seeds = [7 * EVERY, 9 * EVERY, 18 * EVERY]  # many connections that end together
    first, again = histories(*seeds), histories(*reversed(seeds))
    assert first == again[::-1]
    assert first[0] != first[1] != first[2]


def test_a_seed_of_peers_is_one_history() -> None:
    first, again = [list(soak._lines(soak._source(), 3, 4, hosts=3)) for _ in range(2)]
    assert first == again
    assert first != list(soak._lines(soak._source(), 3, 4, hosts=2))


def test_finds_nothing_in_the_first_seeds_of_more_peers() -> None:
    result = soak.run(1, 1, hosts=8)
    assert result.found == []
    assert result.operations > 10


@pytest.mark.parametrize("name", ["changes-after-a-gap-are-taken", "chunk-for-a-peer-stays-pinned"])
def test_finds_a_mutation_of_the_peers(name: str) -> None:
    (row,) = soak.run_mutations(30, names=(name,), hosts=3).rows
    assert row.found


_COUNTS = """
import sys
from kvhold_lab.simulation.clears import HostClears
from kvhold_lab.simulation.run import simulate
sys.unraisablehook = lambda _: None
asked, why = set(), HostClears._why
def counted(self, clear, origin, *when):
    place = "stored" if origin is None else "shared" if origin.shared else "disk"
    asked.add((clear.host == self._host, place))
    return why(self, clear, origin, *when)
HostClears._why = counted
findings = 0
for seed in map(int, sys.argv[1:]):
    findings += len(simulate(seed).findings)
    if len(asked) == 6:
        break
print(len(asked), findings)
"""


def test_the_promise_is_asked_of_chunks_from_all_places_and_of_clears_of_all_hosts() -> None:
    seeds = [str(number * EVERY) for number in (2, 22, 33, *range(1, 100))]  # rare ones first
    command = [sys.executable, "-W", "ignore", "-c", _COUNTS, *seeds]
    counted = subprocess.run(
        command,
        env=soak._environment(soak._source()),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert counted.stdout.split() == ["6", "0"]


def test_there_are_twelve_mutations_or_more_and_each_fits_the_code(tmp_path: Path) -> None:
    assert len(mutations()) >= 12
    patches = mutations(rare=True)
    source = Path(kvhold.__file__).parents[1]
    for patch in patches:
        folder = tmp_path / patch.stem
        for hunk in _hunks(patch.read_text()):
            file = folder / hunk.file
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / hunk.file, file)
        apply(patch, folder)


def test_a_patch_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kvhold").mkdir()
    (tmp_path / "kvhold" / "code.py").write_text("a\nb\na\n")
    patch = tmp_path / "one.patch"
    for before in ("a", "c"):
        patch.write_text(
            f"--- a/kvhold/code.py\n+++ b/kvhold/code.py\n@@ -1 +1 @@\n-{before}\n+d\n"
        )
        with pytest.raises(PatchError, match="there must be exactly one"):
            apply(patch, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "claim-takes-no-pin",
        "memory-back-at-the-hang-up",
        "clear-from-elsewhere-leaves-memory",
        "handover-has-no-deadline",
        "span-has-the-name-of-a-prompt",
        "clear-leaves-spans",
    ],
)
def test_finds_a_mutation(name: str) -> None:
    (row,) = soak.run_mutations(200, names=(name,)).rows
    assert row.found
