"""Amounts per second of the last minute."""

from kvhold.core.rates import LastMinute


def test_a_rate_is_of_the_last_minute() -> None:
    now_s = 1000.0
    rate = LastMinute(lambda: now_s)
    assert rate.per_s == 0.0
    rate.add(100)
    now_s += 10
    rate.add(100)
    assert rate.per_s == 20.0, "it has run for ten seconds"
    now_s += 190
    assert rate.per_s == 0.0
    for _ in range(120):
        rate.add(5)
        now_s += 1
    assert 4.5 <= rate.per_s <= 5.5
