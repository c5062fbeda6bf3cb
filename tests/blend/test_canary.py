"""The canary compares its share of requests, and withdraws for drift and not for noise."""

import math
import random
from itertools import count
from pathlib import Path

import pytest

from kvhold.blend.canary import Canary, Drift, drift_of
from kvhold.blend.permits import BlendRefusal, Permit, Permits
from kvhold.core.blend_config import BlendConfig
from tests.blend.permits import permit_of

GOOD, BAD = Drift(0.001, True), Drift(3.0, False)


@pytest.fixture
def permits(tmp_path: Path) -> Permits:
    permits = Permits(tmp_path)
    permits.grant(permit_of())
    return permits


def granted(permits: Permits) -> Permit:
    found = permits.find("tiny", "query ratio=0.1")
    assert isinstance(found, Permit)
    return found


class TestShare:
    @pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.7, 1.0])
    def test_it_is_kept_exactly_enough(self, permits: Permits, share: float) -> None:
        canary, permit = Canary(permits, share=share), granted(permits)
        due = [canary.is_due(permit) for _ in range(2_000)]
        assert due[0]
        assert sum(due) == pytest.approx(2_000 * share, rel=0.03, abs=1)

    def test_one_in_each_run_of_requests_at_places_that_the_seed_gives(
        self, permits: Permits
    ) -> None:
        permit = granted(permits)

        def places(seed: int) -> list[int]:
            canary = Canary(permits, share=0.02, seed=seed)
            return [number for number in range(1_000) if canary.is_due(permit)]

        assert [place // 50 for place in places(0)] == list(range(20))
        assert places(0) == places(0) != places(1)
        assert len({place % 50 for place in places(0)}) > 10

    def test_none_of_a_share_of_zero(self, permits: Permits) -> None:
        canary, permit = Canary(permits, share=0), granted(permits)
        assert not any(canary.is_due(permit) for _ in range(100))

    def test_after_one_beyond_the_bound_each_request_until_that_is_settled(
        self, permits: Permits
    ) -> None:
        canary, permit = Canary(permits, share=0.01), granted(permits)
        assert canary.is_due(permit)
        canary.record(permit, BAD)
        for _ in range(4):
            assert canary.is_due(permit)
            canary.record(permit, GOOD)
        assert not canary.is_due(permit)


class TestStatistic:
    @pytest.mark.parametrize("kl", [0.5, 1e6, math.nan, math.inf])
    def test_one_outlier_does_not_withdraw(self, permits: Permits, kl: float) -> None:
        canary, permit = Canary(permits), granted(permits)
        for _ in range(50):
            assert canary.record(permit, Drift(kl, False)) == ""
            for _ in range(20):
                assert canary.record(permit, GOOD) == ""
        assert granted(permits) == permit

    def test_four_in_a_row_withdraw_for_all(self, permits: Permits) -> None:
        canary, permit = Canary(permits), granted(permits)
        for _ in range(500):
            canary.record(permit, GOOD)
        said = [canary.record(permit, BAD) for _ in range(4)]
        assert said[:3] == ["", "", ""]
        assert said[3] == (
            "4 of 4 canaries drifted by more than 0.05 nats, the last by 3; was 0.05 or less in "
            "95 %"
        )
        found = Permits(permits.folder).find("tiny", "query ratio=0.1")
        assert isinstance(found, BlendRefusal) and said[3] in found.reason

    def test_a_new_permit_begins_afresh(self, permits: Permits) -> None:
        canary, permit = Canary(permits), granted(permits)
        for _ in range(3):
            canary.record(permit, BAD)
        permits.grant(permit_of(granted="later"))
        assert canary.record(granted(permits), BAD) == ""
        assert canary.record(permit, BAD)
        assert isinstance(permits.find("tiny", "query ratio=0.1"), Permit)

    def test_false_alarms_are_one_in_ten_thousand_comparisons_or_fewer(
        self, tmp_path: Path
    ) -> None:
        """As many beyond the bound as the permit has: 5 %."""
        rng, alarms = random.Random(7), 0
        permits = Permits(tmp_path)
        canary, permit = Canary(permits), permit_of()
        permits.grant(permit)
        for _ in range(100_000):
            alarms += bool(canary.record(permit, BAD if rng.random() < 0.05 else GOOD))
        assert alarms <= 10

    def test_half_of_the_requests_beyond_the_bound_are_found_soon(self, tmp_path: Path) -> None:
        rng, delays = random.Random(7), []
        for _ in range(200):
            canary, permit = Canary(Permits(tmp_path)), permit_of()
            for number in count(1):
                if canary.record(permit, BAD if rng.random() < 0.5 else GOOD):
                    delays.append(number)
                    break
        assert sum(delays) / len(delays) < 20

    def test_the_bound_is_the_permit_s_or_the_setting_s_and_never_tiny(
        self, permits: Permits
    ) -> None:
        def withdraws(kl: float, usual: float, bound: float | None) -> bool:
            canary = Canary.of(BlendConfig(max_kl=bound), permits)
            permit = permit_of(kl_usual=usual)
            return any(canary.record(permit, Drift(kl, True)) for _ in range(4))

        assert not withdraws(0.3, usual=0.4, bound=None)
        assert withdraws(0.5, usual=0.4, bound=None)
        assert not withdraws(0.015, usual=0.0, bound=None)
        assert withdraws(0.025, usual=0.0, bound=None)
        assert not withdraws(0.5, usual=0.4, bound=0.6)
        assert withdraws(0.015, usual=0.0, bound=0.01)


class TestDrift:
    def test_is_that_of_the_distributions(self) -> None:
        torch = pytest.importorskip("torch")
        full = torch.log(torch.tensor([0.5, 0.25, 0.25]))
        other = torch.log(torch.tensor([0.25, 0.5, 0.25]))
        assert drift_of(full, full) == Drift(0.0, True)
        found = drift_of(full, other)
        assert found.kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
        assert not found.agrees

    def test_tokens_without_probability_do_not_count_and_no_number_is_none(self) -> None:
        torch = pytest.importorskip("torch")
        masked = torch.tensor([0.0, 1.0, -torch.inf])
        assert drift_of(masked, masked) == Drift(0.0, True)
        assert drift_of(masked, torch.tensor([0.0, -torch.inf, 0.0])).kl == math.inf
        assert math.isnan(drift_of(masked, torch.full((3,), torch.nan)).kl)
