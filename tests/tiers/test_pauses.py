"""A thread that works on many files pauses, so that the loop's thread gets the GIL."""

import time

import pytest

from kvhold.tiers.files.pauses import with_pauses


@pytest.mark.parametrize(("num_items", "num_pauses"), [(0, 0), (99, 0), (100, 1), (250, 2)])
def test_every_item_is_yielded_and_each_hundredth_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch, num_items: int, num_pauses: int
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert list(with_pauses(range(num_items))) == list(range(num_items))
    assert len(pauses) == num_pauses
    assert all(0 < pause_s <= 0.001 for pause_s in pauses)
