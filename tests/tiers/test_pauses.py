"""A thread that works on many files pauses, so that the loop's thread gets the GIL."""

import time

import pytest

from kvhold.tiers.files.pauses import with_pauses


@pytest.mark.parametrize(("item_s", "num_pauses"), [(0.0, 0), (0.0002, 4), (0.002, 12)])
def test_every_item_is_yielded_and_each_half_millisecond_of_work_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch, item_s: float, num_pauses: int
) -> None:
    now_s, pauses = [5.0], list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", pauses.append)
    found = []
    for item in with_pauses(range(12)):
        found.append(item)
        now_s[0] += item_s
    assert found == list(range(12))
    assert len(pauses) == num_pauses
    assert all(0 < pause_s <= 0.001 for pause_s in pauses)
