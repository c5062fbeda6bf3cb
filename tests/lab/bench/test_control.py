"""`kvhold bench control` in small: every row is there."""

import pytest

from kvhold_lab.bench.control import ControlSizes, rows
from tests.programs import needed_program

pytestmark = pytest.mark.server


def test_requests_are_answered_while_an_engine_looks_up() -> None:
    measured = {
        row.name: row
        for row in rows(
            ControlSizes(
                chunks=2000,
                namespaces=4,
                windows=2,
                window_s=0.5,
                scrapes=4,
                calls=40,
                history_step_s=3600,
            )
        )
    }
    compared = measured["p99 of a lookup of 32,000 tokens, 4 scrapes, 40 calls"]
    assert compared.limit is not None and compared.ratio is not None
    assert compared.interval is not None and compared.noise is not None
    low, high = compared.interval
    assert low <= compared.ratio <= high and compared.noise >= 1
    undecided = low / compared.noise <= 1.1 < high * compared.noise
    assert compared.ok == (None if undecided else compared.ratio <= 1.1)
    assert measured["a scrape"].ok is None
    assert measured["a scrape"].value > 0 < measured["a call"].value
    shown = [row for name, row in measured.items() if name.startswith("the dashboard is shown")]
    assert all(row.ok == (row.value <= 1) for row in shown)
    needed_program("chromium"), needed_program("chromedriver")
    assert len(shown) == 1
