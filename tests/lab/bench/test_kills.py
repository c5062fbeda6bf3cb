"""`kvhold bench soak kills`, shorter."""

import pytest

from kvhold_lab.bench.soak import kills

pytestmark = pytest.mark.server


def test_what_was_written_survives_kills_and_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "_ROUNDS_A_SPACE", 3)
    done = kills.run(rounds=6, seed=1)
    assert done.passed and not (done.lost or done.wrong or done.misaccounted)
    assert done.acknowledged > 0 and done.looked_up > 0
