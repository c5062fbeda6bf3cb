"""When namespaces were last cleared."""

from kvhold.cache.clear_times import ClearTimes

ONE, OTHER = b"one", b"other"


def test_a_later_clear_has_a_later_time_even_if_the_clock_was_set_back() -> None:
    times = ClearTimes()
    assert times.of(ONE) == 0
    times.note(ONE, 100)
    assert (times.of(ONE), times.of(OTHER)) == (100, 0)
    times.note(ONE, 50)
    assert times.of(ONE) == 101
    times.note(b"", 50)
    assert times.of(ONE) == times.of(OTHER) == 102
    times.note(OTHER, 10)
    assert (times.of(ONE), times.of(OTHER)) == (102, 103)


def test_a_repeated_clear_has_the_time_of_the_first() -> None:
    times = ClearTimes()
    times.note(ONE, 100, at_ns=7000)
    assert times.of(ONE) == 7000


def test_the_number_of_namespaces_is_limited() -> None:
    times = ClearTimes()
    for number in range(5000):
        times.note(number.to_bytes(8, "little"), 100)
    assert len(times._ns) == 4096
    assert times.of((4999).to_bytes(8, "little")) == 100
