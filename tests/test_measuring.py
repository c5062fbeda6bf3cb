"""Lines are measured in the first part of each test, whatever the test does."""

import time
from types import SimpleNamespace

import pytest

from tests.measuring import MEASURED_S, Measuring

PATIENT_S = 20.0


class Lines:
    def __init__(self) -> None:
        self.is_measuring = True

    def start(self) -> None:
        assert not self.is_measuring
        self.is_measuring = True

    def stop(self) -> None:
        assert self.is_measuring
        self.is_measuring = False


def compute_until_paused(lines: Lines) -> None:
    until_s = time.process_time() + PATIENT_S
    while lines.is_measuring:
        assert time.process_time() < until_s, "measuring was not paused"


def test_each_test_is_measured_anew_though_one_replaces_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: float) -> None:
        raise ValueError("a clock of the test's own")

    lines = Lines()
    measuring = Measuring(SimpleNamespace(_collector=lines))
    monkeypatch.setattr("time.sleep", broken)
    for _ in range(2):
        began_s = time.process_time()
        measuring.begin()
        compute_until_paused(lines)
        assert time.process_time() - began_s > MEASURED_S
        measuring.end()
        assert not lines.is_measuring
    measuring.close()
    assert lines.is_measuring
