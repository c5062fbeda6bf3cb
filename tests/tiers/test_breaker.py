"""When a tier is left alone, and when it is tried again."""

from kvhold.tiers.breaker import Breaker


def broken(breaker: Breaker, now_s: float = 0.0) -> Breaker:
    while breaker.allows:
        breaker.failed(now_s)
    return breaker


def next_try_s(breaker: Breaker) -> float:
    assert breaker.next_try_s is not None
    return breaker.next_try_s


def test_it_opens_after_so_many_failures_in_a_row_and_says_so_once() -> None:
    breaker = Breaker(failures=3, first_pause_s=1.0)
    assert [breaker.failed(10.0) for _ in range(2)] == [False, False]
    assert breaker.allows
    assert (breaker.failed(10.0), breaker.allows) == (True, False)
    assert breaker.next_try_s == 11.0
    assert not breaker.failed(10.0)


def test_a_success_begins_the_count_anew() -> None:
    breaker = Breaker(failures=2, first_pause_s=1.0)
    for _ in range(5):
        assert not breaker.failed(0.0)
        assert not breaker.succeeded()
    assert breaker.allows


def test_what_cannot_get_better_opens_it_at_once() -> None:
    assert Breaker(failures=3, first_pause_s=1.0).failed(0.0, for_good=True)


def test_a_success_closes_it_and_says_so_once() -> None:
    breaker = broken(Breaker(failures=3, first_pause_s=1.0))
    assert breaker.succeeded()
    assert breaker.allows
    assert breaker.next_try_s is None
    assert not breaker.succeeded()
    assert [breaker.failed(0.0), breaker.failed(0.0), breaker.failed(0.0)] == [False, False, True]


def test_each_try_that_fails_doubles_the_pause_up_to_half_a_minute() -> None:
    breaker = broken(Breaker(failures=1, first_pause_s=1.0))
    pauses = []
    for _ in range(8):
        now_s = next_try_s(breaker)
        breaker.failed(now_s)
        pauses.append(next_try_s(breaker) - now_s)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    breaker.succeeded()
    assert broken(breaker, 100.0).next_try_s == 101.0, "and is short again after a success"


def test_calls_in_progress_when_it_opened_do_not_lengthen_the_pause() -> None:
    breaker = broken(Breaker(failures=1, first_pause_s=1.0))
    for _ in range(10):
        breaker.failed(0.5)
    assert breaker.next_try_s == 1.0
