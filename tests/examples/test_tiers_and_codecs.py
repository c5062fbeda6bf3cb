"""After a restart the disk gives every chunk back, as exact as its codec states, in fewer bytes."""

import re

import pytest

from tests.examples.running import run_example

pytest.importorskip("numba", reason="no numba in this environment")

LINE = re.compile(
    r"(\S+): (\d+) chunks from (\{.*\}), (\d+)% of \d+ bytes on disk; "
    r"largest error ([\d.]+) of at most ([\d.]+)"
)


def test_codecs_make_the_disk_smaller_within_their_bounds() -> None:
    lines = run_example("tiers_and_codecs.py").splitlines()
    found = [match.groups() for line in lines if (match := LINE.fullmatch(line))]
    assert [name for name, *_ in found] == ["raw", "lossless", "int8"]
    assert all((chunks, sources) == ("4", "{'disk': 512}") for _, chunks, sources, *_ in found)
    percents = [int(percent) for *_, percent, _, _ in found]
    assert 100 <= percents[0] < 102 and percents == sorted(percents, reverse=True)
    assert percents[2] < 30
    errors = [float(error) for *_, error, _ in found]
    assert errors[:2] == [0, 0]
    assert 0 < errors[2] <= float(found[2][-1])
