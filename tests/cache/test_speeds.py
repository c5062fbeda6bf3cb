"""A tier's speed is found from reads, whatever their sizes and however they overlap; what is silent
is thought to stay silent.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.cache.transfer.speeds import TierSpeed

MB = 1 << 20


def read(speed: TierSpeed, nbytes: int, now_s: float, *, call_s: float, byte_s: float) -> float:
    """One read from an idle tier; returns when it has ended."""
    speed.requested(nbytes, now_s)
    now_s += call_s + nbytes * byte_s
    speed.ended(nbytes, now_s)
    return now_s


def test_nothing_is_known_of_a_tier_that_was_never_read() -> None:
    speed = TierSpeed()
    assert not speed.is_known and speed.costs is None and speed.most_bytes == 0
    assert speed.wait_s(np.array([0, 5])).tolist() == [0, 0]
    assert speed.is_stale(0.0)
    read(speed, MB, 0.0, call_s=0.01, byte_s=1e-7)
    assert (speed.is_known, speed.most_bytes) == (True, 8 * MB)


@given(
    st.floats(1e-4, 0.05),
    st.floats(1e-9, 1e-6),
    st.permutations([3 << 13 << doubled for doubled in range(11)]),
)
def test_latency_and_bandwidth_of_an_idle_tier(
    call_s: float, byte_s: float, sizes: list[int]
) -> None:
    speed, now_s = TierSpeed(), 100.0
    for nbytes in sizes:
        now_s = read(speed, nbytes, now_s, call_s=call_s, byte_s=byte_s) + 1
    assert speed.wait_s(np.array([0]))[0] == 0
    errors = speed.wait_s(np.array(sizes)) / (call_s + np.array(sizes) * byte_s) - 1
    assert np.mean(np.abs(errors)) < 0.05


def test_a_busy_tier_is_measured_and_new_reads_wait_behind_its_queue() -> None:
    speed, now_s, byte_s = TierSpeed(), 0.0, 1e-8
    for _ in range(40):
        speed.requested(8 * MB, 0.0)
    for _ in range(40):
        now_s += 8 * MB * byte_s
        for _ in range(8):
            speed.ended(MB, now_s)  # one call brings several
    assert speed.costs is not None
    assert speed.costs[1] == pytest.approx(byte_s, rel=0.05)
    speed.requested(10 * MB, now_s)
    assert speed.wait_s(np.array([MB]))[0] == pytest.approx(
        speed.costs[0] + 11 * MB * byte_s, rel=0.05
    )
    assert speed.left_s(speed.requested_bytes, now_s) == pytest.approx(
        speed.costs[0] + 10 * MB * byte_s, rel=0.05
    )


def test_a_failed_read_says_nothing_about_speed() -> None:
    speed = TierSpeed()
    speed.requested(MB, 0.0)
    speed.ended(MB, 0.001, ok=False)
    assert not speed.is_known
    assert not speed.is_stale(1.0) and speed.is_stale(31.0)


def test_a_silent_tier_is_expected_to_stay_silent_as_long_again() -> None:
    speed, now_s = TierSpeed(), 0.0
    for nbytes in (MB, 2 * MB, 4 * MB):
        now_s = read(speed, nbytes, now_s, call_s=0.0, byte_s=1e-7) + 1
    speed.requested(MB, now_s)
    expected = MB * 1e-7
    left = [
        speed.left_s(speed.requested_bytes, now_s + part * expected)
        for part in (0, 0.25, 1, 1.4, 5, 50)
    ]
    assert left == pytest.approx(
        [part * expected for part in (1, 0.75, 0.25, 0.25, 5, 50)], rel=0.05
    )
    assert speed.left_s(speed.ended_bytes, now_s) == 0


def test_a_read_slower_than_estimated_is_expected_to_stay_slow() -> None:
    speed = TierSpeed()
    # one read: a slow answer, as far as anybody knows
    now_s = read(speed, MB, 0.0, call_s=0.3, byte_s=0.0) + 1
    speed.requested(8 * MB, now_s)
    speed.ended(MB, now_s + 0.3)
    assert speed.left_s(speed.requested_bytes, now_s + 0.3, more_bytes=40 * MB) == 0, (
        "all of it in one answer"
    )
    speed.ended(MB, now_s + 0.6)
    assert speed.left_s(speed.requested_bytes, now_s + 0.6) == pytest.approx(6 * 0.3)
    assert speed.left_s(speed.requested_bytes, now_s + 0.6, more_bytes=40 * MB) == pytest.approx(
        46 * 0.3
    )


def test_a_late_read_of_a_rarely_measured_tier_may_take_far_longer() -> None:
    speed = TierSpeed()
    now_s = read(speed, MB, 0.0, call_s=0.3, byte_s=0.0) + 1
    speed.requested(2 * MB, now_s)
    assert speed.left_s(speed.requested_bytes, now_s + 0.4) == pytest.approx(0.1 * 0.75), (
        "not late yet"
    )
    assert speed.left_s(speed.requested_bytes, now_s + 0.5) == pytest.approx(2 * 0.3), (
        "if it was the bytes that took so long"
    )
    assert speed.left_s(speed.requested_bytes, now_s + 1.0) == pytest.approx(8 * 1.0), (
        "that is late, too"
    )


def test_reads_of_one_size_say_little_of_how_long_a_far_larger_one_takes() -> None:
    speed, now_s = TierSpeed(), 0.0
    for _ in range(6):
        now_s = read(speed, MB, now_s, call_s=0.3, byte_s=0.0) + 1
    speed.requested(MB, now_s)
    assert speed.left_s(speed.requested_bytes, now_s + 0.5) == pytest.approx(0.5), (
        "as large as the others, and late"
    )
    speed.ended(MB, now_s + 0.5)
    speed.requested(8 * MB, now_s + 1)
    assert speed.left_s(speed.requested_bytes, now_s + 1.4) == pytest.approx(
        0.1 * 0.75, rel=0.01
    ), "not late yet"
    assert speed.left_s(speed.requested_bytes, now_s + 1.46) == pytest.approx(8 * 0.3, rel=0.01)
    assert speed.left_s(speed.requested_bytes, now_s + 1.7) == pytest.approx(8 * 0.3, rel=0.01), (
        "if it was the bytes that took so long"
    )
    assert speed.left_s(speed.requested_bytes, now_s + 1.7, more_bytes=8 * MB) == pytest.approx(
        16 * 0.3, rel=0.01
    ), "and of the rest, too"
    assert speed.left_s(speed.requested_bytes, now_s + 1 + 1.6 * 2.4) == pytest.approx(
        8 * 1.6 * 2.4
    ), "that is late, too"
    speed.ended(8 * MB, now_s + 2.4)
    speed.requested(8 * MB, now_s + 3)
    assert speed.left_s(speed.requested_bytes, now_s + 6) == pytest.approx(3), "sizes differ now"


def test_of_reads_under_way_together_the_first_may_end_late() -> None:
    speed, now_s, byte_s = TierSpeed(), 0.0, 1e-7
    for nbytes in (MB, 2 * MB, 8 * MB, 3 * MB):
        now_s = read(speed, nbytes, now_s, call_s=0.0, byte_s=byte_s) + 1
    for _ in range(4):
        speed.requested(8 * MB, now_s)
    now_s += 31 * MB * byte_s
    speed.ended(8 * MB, now_s)
    assert speed.left_s(speed.requested_bytes, now_s, more_bytes=8 * MB) == pytest.approx(
        32 * MB * byte_s, rel=0.05
    )


def test_a_slow_tier_is_tried_anew_less_often() -> None:
    speed = TierSpeed()
    end_s = read(speed, MB, 0.0, call_s=10.0, byte_s=0.0)
    assert not speed.is_stale(end_s + 199)
    assert speed.is_stale(end_s + 201)
    speed.requested(MB, end_s + 201)
    assert not speed.is_stale(end_s + 1000), "it is being tried"
