"""What a disk tier has acknowledged survives `kill -9`, at any moment, and nothing else is taken
for a value.

DISK_CRASH_ROUNDS=1000 python -m pytest tests/tiers/test_disk_crash.py      # as long as you like
python -m tests.tiers.test_disk_crash_writer FOLDER SEED FIRST_NUMBER MAX_BYTES    # the process
that is killed
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvhold.testing.tier import fetch, scanned
from kvhold.tiers.disk import DiskConfig, DiskTier
from tests.tiers.test_disk_crash_writer import (
    LARGEST_BYTES,
    MOST_NUMBERS,
    key_of,
    replacement_of,
    value_of,
)

ROUNDS = int(os.environ.get("DISK_CRASH_ROUNDS", "8"))
MIB = 1 << 20
KEPT = 20  # values that go from one round to the next
MOST_WRITES = 60  # acknowledged before a writer is killed


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured_children")
@pytest.mark.parametrize("max_bytes", [1 << 30, 2 * MIB], ids=["with room", "evicting"])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, max_bytes: int) -> None:
    chance = random.Random(max_bytes)
    expected: set[int] = set()  # numbers of values that must be there
    for turn in range(ROUNDS):
        stored, deleting, deleted = run_and_kill(
            tmp_path, seed=turn, first=turn * 10_000, max_bytes=max_bytes, chance=chance
        )
        tier = DiskTier(DiskConfig(path=str(tmp_path), max_bytes=max_bytes))
        numbers = known_keys(turn)
        there = {numbers[key]: key for key in await scanned(tier)}
        values = await fetch(tier, list(there.values()), [LARGEST_BYTES + 4096] * len(there))
        for number, value in zip(there, values, strict=True):
            assert value in (value_of(number), replacement_of(number)), (
                "a hit is exact, before it was replaced and after"
            )
        expected = (expected | stored) - deleting
        if max_bytes > 100 * MIB:
            assert expected <= set(there), "what was acknowledged is there"
        assert not deleted & set(there), "what was deleted is not"
        files = files_in(tmp_path)
        assert tier.used_bytes == sum(path.stat().st_blocks * 512 for path in files) <= max_bytes
        assert len(files) == len(there), "nothing else is left"
        surplus = sorted(there)[:-KEPT]
        await tier.delete([there[number] for number in surplus])
        expected -= set(surplus)
        await tier.close()


def run_and_kill(
    folder: Path, *, seed: int, first: int, max_bytes: int, chance: random.Random
) -> tuple[set[int], set[int], set[int]]:
    """Let a process put and delete, and kill it: numbers that were stored, whose deletion was
    begun, that were deleted.
    """
    said: dict[bytes, set[int]] = {b"stored": set(), b"deleting": set(), b"deleted": set()}
    command = [
        sys.executable,
        "-m",
        "tests.tiers.test_disk_crash_writer",
        str(folder),
        str(seed),
        str(first),
        str(max_bytes),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        left = chance.randrange(MOST_WRITES)
        for line in process.stdout:
            note(said, line)
            left -= 1
            if left < 0:
                break
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:  # what it had said before it died
            if line.endswith(b"\n"):
                note(said, line)
    assert process.returncode == -signal.SIGKILL, "it ended by itself"
    return said[b"stored"], said[b"deleting"], said[b"deleted"]


def note(said: dict[bytes, set[int]], line: bytes) -> None:
    word, number = line.split()
    said[word].add(int(number))


def known_keys(turn: int) -> dict[bytes, int]:
    """Every key that may be there after this turn: each leaves KEPT values, which are
    the newest.
    """
    turns = range(max(0, turn - KEPT), turn + 1)
    return {
        key_of(number): number
        for t in turns
        for number in range(t * 10_000, t * 10_000 + MOST_NUMBERS)
    }


def files_in(folder: Path) -> list[Path]:
    """All but the lock and the identity."""
    others = ("kvhold.lock", "kvhold.identity")
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in others]
