"""What tiers share."""

import pytest

from kvhold.core.errors import TierError, TierUnavailable
from kvhold.tiers.base import raise_if_all_failed

FIRST, OTHER = TierUnavailable("fs", "get", "first"), TierError("fs", "get", "other")


def test_the_first_fault_is_raised_if_all_answers_are_faults() -> None:
    with pytest.raises(TierUnavailable, match="first"):
        raise_if_all_failed([FIRST, OTHER])


@pytest.mark.parametrize("answers", [[], [None], [FIRST, None], [7, OTHER]])
def test_one_answer_is_enough(answers: list[object]) -> None:
    raise_if_all_failed(answers)
