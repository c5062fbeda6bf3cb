"""What the learned policy learns: the times until chunks are used again, and what it remembers of
evicted ones.
"""

import numpy as np
import pytest

from kvhold.tiers.policies import reuse_times
from kvhold.tiers.policies.ghosts import MOST_USES, Ghost, Ghosts, pack, run_of, unpack
from kvhold.tiers.policies.reuse_times import ReuseTimes, Use
from tests.tiers.learnt import a_key

DAY_S = 24 * 3600.0


class TestReuseTimes:
    """Kind 0 comes back after a minute, kind 1 never, kind 2 half of the time."""

    def learnt(self) -> ReuseTimes:
        times = ReuseTimes((3,))
        waiting: list[tuple[float, Use]] = []
        for second in range(0, 4000, 2):
            times.advance(float(second))
            while waiting and waiting[0][0] <= second:
                times.end(waiting.pop(0)[1])
            waiting.append((second + 60.0, times.use(0)))
            times.use(1)
            half = times.use(2)
            if second % 4:
                waiting.append((second + 60.0, half))
        return times

    def test_a_chunk_is_worth_more_the_more_probable_its_next_use_is(
        self,
    ) -> None:
        times = self.learnt()
        surely, never, perhaps = (times.worth_of_new(kind) for kind in range(3))
        assert surely > perhaps > never
        assert surely > 0.8
        assert 0.3 < perhaps < 0.7
        assert never < 0.1

    def test_what_is_overdue_is_worth_little(self) -> None:
        times = self.learnt()
        use = times.use(0)
        worth = [times.worth(use)]
        for seconds in (50.0, 200.0):
            times.advance(times.now_s + seconds)
            worth.append(times.worth(use))
        assert worth[1] > 0.8
        assert worth[2] < 0.3

    def test_no_chunk_is_worth_more_than_a_sure_use_however_few_reach_its_age(self) -> None:
        hazards = np.zeros((1, 44))
        hazards[:, :26] = 0.9
        yields, (worths,) = reuse_times._evaluate(hazards, [0.01])
        assert worths.min() >= 0.0
        assert worths.max() <= 1.0
        assert worths[0, 25] == pytest.approx(worths[0, 24], rel=0.5)
        assert worths[0, 30] == 0.0 == yields[0, 30]

    def test_a_chunk_below_the_price_is_worth_0_and_below_0_before_it_is_stored(
        self,
    ) -> None:
        times = self.learnt()
        for _ in range(500):
            times.advance(times.now_s + 0.5)
            times.evicted(times.use(0))
        use = times.use(1)
        assert times.worth_of_new(1) < 0.0
        for _ in range(20):
            assert times.worth(use) == 0.0
            times.advance(times.now_s + 0.5)

    def test_an_open_interval_counts_only_for_the_ages_that_it_has_reached(self) -> None:
        """Else all chunks of a new server would seem to come back never."""
        times = ReuseTimes((1,))
        before = times.worth_of_new(0)
        for _ in range(40):
            times.advance(times.now_s + 0.3)
            times.use(0)
        assert times.worth_of_new(0) == pytest.approx(before, rel=0.35)

    def test_what_is_forgotten_ends_nothing(self) -> None:
        times = ReuseTimes((1,))
        for _ in range(200):
            times.advance(times.now_s + 1.0)
            times.forget(times.use(0))
        unseen = ReuseTimes((1,))
        for _ in range(200):
            unseen.advance(unseen.now_s + 1.0)
        assert times.worth_of_new(0) == pytest.approx(unseen.worth_of_new(0))

    def test_a_use_is_found_again_by_its_time_however_long_ago(self) -> None:
        times = ReuseTimes((2,))
        uses = []
        for _ in range(500):
            times.advance(times.now_s + 7.0)
            uses.append((times.now_s, times.use(1)))
        for at_s, use in uses[::50]:
            found, num = times.use_at(1, at_s), times.num_open(use)
            times.forget(found)
            assert times.num_open(use) == num - 1

    def test_a_chunk_is_expected_after_the_median_of_the_times_that_are_left(self) -> None:
        times = self.learnt()
        for age_s in (0.0, 10.0, 40.0):
            expected_s = times.expected_s(0, age_s)
            assert expected_s is not None
            assert 40.0 < age_s + expected_s < 70.0
        assert times.expected_s(1, 0.0) is None, "most do not come back"
        assert times.expected_s(0, 3600.0) is None, "it is long overdue"
        assert ReuseTimes((3,)).expected_s(0, 0.0) is None, "nothing was learnt yet"

    @pytest.mark.parametrize("hazard", [0.9, 1.5, -0.1])
    @pytest.mark.parametrize("age_s", [0.0, 90 * DAY_S])
    def test_no_chunk_is_expected_in_the_past(self, hazard: float, age_s: float) -> None:
        """Counts are a little wrong where a chunk was taken for another."""
        times = self.learnt()
        times._round_hazards[:] = hazard
        expected_s = times.expected_s(0, age_s)
        assert (expected_s is None) == (hazard < 0)
        assert expected_s is None or expected_s >= 0.0

    def test_what_saves_more_pays_at_a_price_at_which_others_do_not(self) -> None:
        times = ReuseTimes((1,), (0.25, 1.0, 4.0))
        for factor in range(3):
            times.use_factor(factor)
        uses: list[Use] = []
        for second in range(2000):
            times.advance(float(second))
            use = times.use(0)
            if second % 10 == 0:
                uses.append(use)
            if second % 100 == 60:
                times.end(uses.pop())
            times.evicted(use, 1)
        worth = [times.worth_of_new(0, factor) for factor in range(3)]
        assert worth[0] <= worth[1] / 4
        assert worth[2] > 4 * worth[1]

    def test_a_place_below_has_the_same_worths_until_it_has_another_price(self) -> None:
        times = ReuseTimes((1,), (1.0, 4.0))
        times.use_factor(1)
        below = times.add_place()
        sold: list[float] = []
        for second in range(4000):
            times.advance(float(second))
            use = times.use(0)
            if second == 2000:
                sold = [below.worth(0, 0.0, factor) for factor in range(2)]
                assert sold == [times.worth_of_new(0, factor) for factor in range(2)]
                assert below.worth(0, 300.0, 0) == times.worth(times.use_at(0, 1700.0))
            if second > 2000:
                times.evicted(use)
                below.sell(below.worth_and_yield(0, DAY_S, 0)[1])  # such old chunks yield nothing
            times.end(use)
        assert times.worth_of_new(0) < sold[0] == pytest.approx(below.worth(0, 0.0, 0), rel=0.05)

    def test_old_counts_fade(self) -> None:
        times = self.learnt()
        for _ in range(2_000):  # kind 0 comes back no more
            times.advance(times.now_s + 40.0)
            times.use(0)
        assert times.worth_of_new(0) < 0.1

    def test_the_number_of_cohorts_is_limited(self) -> None:
        times = ReuseTimes((1,))
        for _ in range(3_000):
            times.advance(times.now_s + 30.0)
            times.use(0)
        assert times.num_cohorts < 200

    def test_the_ages_reached_in_a_long_pause_are_counted_in_several_short_ticks(self) -> None:
        times = ReuseTimes((280,))
        for _ in range(400):
            times.advance(times.now_s + 1.0)
            for kind in range(280):
                times.use(kind)
        num_cohorts = times.num_cohorts
        assert num_cohorts > 20
        times.advance(times.now_s + 50_000.0)
        assert sum(cohort.bucket < 30 for cohort in times._cohorts) > num_cohorts / 3
        assert times.num_cohorts > num_cohorts / 3
        for _ in range(20):
            times.advance(times.now_s + 0.25)
        assert times.num_cohorts < 5
        assert times._reached[:, 28] == pytest.approx(400, rel=0.01)  # 5793 s

    def test_chunks_may_be_added_to_an_earlier_use(self) -> None:
        """As if they had been counted when it began."""
        at_once, later = ReuseTimes((2,)), ReuseTimes((2,))
        used = [times.use(1, num) for times, num in ((at_once, 3), (later, 1))]
        for now_s in (1.0, 2.0, 10.0, 60.0):
            for times in (at_once, later):
                times.advance(now_s)
            if now_s == 2.0:
                later.add(used[1], 2)
        for times, use in zip((at_once, later), used, strict=True):
            times.end(use)
        assert at_once._ended.sum() == 1
        assert (at_once._ended == later._ended).all()
        assert at_once._reached == pytest.approx(later._reached, rel=1e-3)
        assert at_once._num_chunks == pytest.approx(later._num_chunks, rel=1e-3)

    def test_after_a_pause_a_tick_computes_more_worths_up_to_a_limit(self) -> None:
        times = ReuseTimes((280,))
        before = 0
        for passed_s, num in ((0.25, 8), (1.0, 32), (3600.0, 64)):
            times.advance(times.now_s + passed_s)
            assert times._to_update - before == num
            before = times._to_update

    def test_equal_calls_have_equal_results(self) -> None:
        first, second = self.learnt(), self.learnt()
        assert [first.worth_of_new(kind) for kind in range(3)] == [
            second.worth_of_new(kind) for kind in range(3)
        ]


class TestGhosts:
    def test_what_is_remembered_is_found_until_it_is_taken(self) -> None:
        ghosts = Ghosts()
        for number in range(1000):
            past = pack(Ghost(2.0 * number, number % 280, 3))
            assert not ghosts.add(a_key(number), past, 3000.0)
        assert ghosts.num == 1000
        for number in range(1000):
            expected = Ghost(2.0 * number, number % 280, 3)
            assert unpack(ghosts.find(a_key(number)), 3000.0) == expected
            assert unpack(ghosts.take(a_key(number)), 3000.0) == expected
            assert not ghosts.find(a_key(number))
        assert ghosts.num == 0

    @pytest.mark.parametrize("later_s", [0.0, 2.0 * (1 << 22) - 100.0, 2.0 * (1 << 22) - 20.0])
    def test_the_oldest_of_a_full_set_is_replaced(self, later_s: float) -> None:
        ghosts = Ghosts(8)  # one set
        for number in range(8):
            ghosts.add(a_key(number), pack(Ghost(later_s + 10.0 * (number + 1), 1, 1)), later_s)
        now_s = later_s + 100.0
        replaced = ghosts.add(a_key(8), pack(Ghost(now_s, 1, 1)), now_s)
        assert unpack(replaced, now_s) == Ghost(later_s + 10.0, 1, 1)
        assert not ghosts.find(a_key(0))
        assert ghosts.num == 8

    def test_a_key_has_one_place(self) -> None:
        ghosts = Ghosts(8)
        ghosts.add(a_key(1), pack(Ghost(4.0, 7, 2)), 4.0)
        assert unpack(ghosts.add(a_key(1), pack(Ghost(8.0, 9, 3)), 8.0), 8.0) == Ghost(4.0, 7, 2)
        assert unpack(ghosts.find(a_key(1)), 8.0) == Ghost(8.0, 9, 3)
        assert ghosts.num == 1

    def test_uses_of_many_are_noted_at_once(self) -> None:
        ghosts = Ghosts(8)
        pasts = [pack(Ghost(20.0, 5, uses)) for uses in range(1, MOST_USES + 1)]
        assert ghosts.use_all([a_key(1), a_key(2)], pasts, 20.0) == ([0, 0], [])
        assert ghosts.use_all([a_key(3), a_key(2)], pasts, 20.0) == ([0, pasts[0]], [])
        assert [ghosts.find(a_key(number)) for number in (1, 2, 3)] == [
            pasts[uses] for uses in (0, 1, 0)
        ]
        earlier, replaced = ghosts.use_all(map(a_key, range(4, 10)), pasts, 20.0)
        assert (earlier, len(replaced)) == (6 * [0], 1)
        assert ghosts.num == 8

    def test_uses_of_those_that_are_known_alone(self) -> None:
        ghosts = Ghosts(8)
        pasts = [pack(Ghost(20.0, 5, uses)) for uses in range(1, MOST_USES + 1)]
        ghosts.use_all([a_key(1)], pasts, 20.0)
        earlier, replaced = ghosts.use_all(map(a_key, range(20)), pasts, 20.0, if_known=True)
        assert (earlier, replaced) == ([0, pasts[0], *(18 * [0])], [])
        assert (ghosts.num, ghosts.find(a_key(1)), ghosts.find(a_key(2))) == (1, pasts[1], 0)

    def test_times_are_right_after_a_year(self) -> None:
        ghosts, now_s = Ghosts(), 365 * DAY_S
        ghosts.add(a_key(1), pack(Ghost(now_s - 40 * DAY_S, 1, 1)), now_s)
        found = unpack(ghosts.find(a_key(1)), now_s)
        assert found.at_s == pytest.approx(now_s - 40 * DAY_S, abs=2.0)

    def test_chunks_of_one_run_may_differ_in_value_and_in_being_a_sample(self) -> None:
        ghosts, past = Ghosts(), pack(Ghost(20.0, 5, 3, 8))
        ghosts.add(a_key(1), past, 20.0)
        assert run_of(ghosts.mark(a_key(1))) == run_of(past) == pack(Ghost(20.0, 5, 3))
        assert run_of(pack(Ghost(20.0, 5, 3, 15))) == run_of(past)
        for other in (Ghost(22.0, 5, 3, 8), Ghost(20.0, 6, 3, 8), Ghost(20.0, 5, 4, 8)):
            assert run_of(pack(other)) != run_of(past)

    def test_uses_are_counted_up_to_a_limit(self) -> None:
        ghosts = Ghosts()
        ghosts.add(a_key(1), pack(Ghost(0.0, 1, 1000)), 0.0)
        assert unpack(ghosts.take(a_key(1)), 0.0) == Ghost(0.0, 1, MOST_USES)

    def test_a_sample_stays_one_until_it_is_used(self) -> None:
        ghosts, past = Ghosts(), pack(Ghost(20.0, 5, 3))
        assert ghosts.mark(a_key(1)) == 0
        ghosts.add(a_key(1), past, 20.0)
        marked = ghosts.mark(a_key(1))
        assert marked == ghosts.find(a_key(1)) != past
        assert unpack(marked, 20.0) == unpack(past, 20.0)
        assert ghosts.add(a_key(1), past, 20.0) == 0, "of another group"
        assert ghosts.find(a_key(1)) == marked
        pasts = [pack(Ghost(40.0, 5, uses)) for uses in range(1, MOST_USES + 1)]
        assert ghosts.use_all([a_key(1)], pasts, 40.0) == ([marked], [])
        assert ghosts.find(a_key(1)) == pasts[3]

    def test_nine_bytes_each(self) -> None:
        assert Ghosts(1 << 10).nbytes == 9 << 10
