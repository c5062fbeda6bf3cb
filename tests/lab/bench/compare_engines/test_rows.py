"""What `kvhold bench compare-engines` makes of times, and what it says of a system that fails; no
processes.
"""

import pytest

from kvhold_lab.bench.compare_engines.rows import (
    IMPORT,
    LOOKUP,
    MEMORY,
    NO_TIER,
    RETRIEVE,
    STORE,
    WRITTEN,
    CompareRow,
    Measured,
    goals,
    make_rows,
    render,
)
from kvhold_lab.bench.compare_engines.systems import (
    CHECKED_LIMIT,
    DRIVEN,
    IN_PROCESS,
    KVHOLD,
    KVHOLD_CACHED,
    SERVER,
)


def row_of(rows: list[CompareRow], system: str, operation: str = RETRIEVE) -> CompareRow:
    (found,) = [row for row in rows if (row.system, row.operation) == (system, operation)]
    return found


def test_rows_have_medians_rates_and_ratios_within_rounds() -> None:
    measured = Measured()
    for slowdown in (1.0, 3.0, 2.0):  # cores are shared: what is slow is slow for all in that round
        measured.add(
            RETRIEVE,
            "ram",
            {KVHOLD: 0.1 * slowdown, SERVER: 0.4 * slowdown, DRIVEN: 0.2 * slowdown},
            nbytes=40_000_000,
        )
    rows = make_rows(measured)
    ours = row_of(rows, KVHOLD)
    assert ours.median_s == pytest.approx(0.2)
    assert ours.mb_s == pytest.approx(200)
    assert ours.best_peer == DRIVEN
    assert ours.ratio_to_best_peer == pytest.approx(0.5)
    assert ours.ratios[SERVER].median == pytest.approx(0.25)
    assert ours.ratios[SERVER].cells == 3
    assert row_of(rows, SERVER).ratio_to_best_peer == pytest.approx(4)
    assert row_of(rows, SERVER).best_peer == KVHOLD


def test_memory_is_in_bytes() -> None:
    measured = Measured()
    measured.add(MEMORY, NO_TIER, {KVHOLD: 1e8, SERVER: 4e8})
    row = row_of(make_rows(measured), KVHOLD, MEMORY)
    assert (row.median_bytes, row.median_s, row.mb_s, row.ratio_to_best_peer) == (
        1e8,
        None,
        None,
        0.25,
    )


def test_a_system_alone_is_compared_with_nobody() -> None:
    measured = Measured()
    measured.add(STORE, "ram", {KVHOLD: 0.1}, nbytes=1)
    rows = make_rows(measured)
    assert (row_of(rows, KVHOLD, STORE).ratio_to_best_peer, row_of(rows, KVHOLD, STORE).ratios) == (
        None,
        {},
    )
    assert goals(rows) == []


def test_a_system_that_never_did_anything_has_a_row_with_its_error() -> None:
    measured = Measured()
    measured.add(STORE, "ram", {KVHOLD: 0.1})
    measured.errors["ram", IN_PROCESS] = "RuntimeError: no connector for a cpu\nand its traceback"
    rows = make_rows(measured)
    assert row_of(rows, IN_PROCESS, "start").error.startswith(
        "RuntimeError: no connector for a cpu"
    )
    text = render(rows)
    assert "FAILED: RuntimeError: no connector for a cpu" in text
    assert "and its traceback" in text


def test_a_system_that_failed_later_keeps_its_times_beside_its_error() -> None:
    measured = Measured()
    measured.add(STORE, "disk", {KVHOLD: 0.1, SERVER: 0.2})
    measured.errors["disk", SERVER] = "TimeoutError: silent"
    row = row_of(make_rows(measured), SERVER, STORE)
    assert (row.median_s, row.error) == (0.2, "TimeoutError: silent")


def test_one_wrong_byte_in_any_round_is_told() -> None:
    measured = Measured()
    for equal in (True, False, True):
        measured.add(RETRIEVE, "ram", {KVHOLD: 0.1})
        measured.compare(RETRIEVE, "ram", KVHOLD, equal)
    rows = make_rows(measured)
    assert row_of(rows, KVHOLD).equal is False
    assert "DIFFER" in render(rows)


def test_goals_are_about_the_fastest_of_lmcache_that_they_name() -> None:
    measured = Measured()
    for _ in range(3):
        # judged by the servers
        measured.add(RETRIEVE, "ram", {KVHOLD: 0.3, IN_PROCESS: 0.1, SERVER: 1.2, DRIVEN: 1.0})
        measured.add(WRITTEN, "disk", {KVHOLD: 0.3, IN_PROCESS: 0.5, SERVER: 1.0})  # judged by all
        measured.add(LOOKUP, "ram", {KVHOLD: 0.3, IN_PROCESS: 1.0})
        measured.add(IMPORT, NO_TIER, {KVHOLD: 0.1, SERVER: 1.0})
    found = {goal.what: goal for goal in goals(make_rows(measured))}
    verdicts = {
        what: (round(goal.ratio.median, 3), goal.most, goal.verdict) for what, goal in found.items()
    }
    assert verdicts == {
        "retrieve (ram): over that of LMCache, the best of its servers": (0.3, 0.5, "yes"),
        "store, written (disk): over that of LMCache, its best mode": (0.6, 0.6, "yes"),
        "lookup (ram): over that of LMCache, its best mode": (0.3, 0.2, "NO"),
        "import: over that of LMCache, the best of its servers": (0.1, 0.5, "yes"),
    }


def test_goals_are_about_our_best_mode_and_say_what_the_limit_itself_would_reach() -> None:
    measured = Measured()
    for _ in range(3):
        values = {
            KVHOLD: 0.9,
            KVHOLD_CACHED: 0.5,
            SERVER: 1.0,
            "limit: O_DIRECT": 0.8,
            "limit: page cache": 0.4,
            CHECKED_LIMIT: 0.45,
        }
        measured.add(RETRIEVE, "cached-disk", values)
        measured.add(WRITTEN, "redis", {KVHOLD: 0.8, SERVER: 1.0, "limit: Redis": 0.7})
    rows = make_rows(measured)
    assert {goal.what: round(goal.ratio.median, 3) for goal in goals(rows)} == {
        "retrieve (cached-disk): over that of LMCache, its best mode": 0.5,
        "retrieve (cached-disk): over that of LMCache, its best mode, the limit itself": 0.4,
        "retrieve (cached-disk): over that of LMCache, its best mode, the limit with a "
        "check and a copy": 0.45,
        "store, written (redis): over that of LMCache, its best mode": 0.8,
        "store, written (redis): over that of LMCache, its best mode, the limit itself": 0.7,
    }
    assert {row.system: row.best_peer for row in rows if row.tier == "cached-disk"} == {
        KVHOLD: SERVER,
        KVHOLD_CACHED: SERVER,
        SERVER: KVHOLD_CACHED,
        "limit: O_DIRECT": KVHOLD_CACHED,
        "limit: page cache": KVHOLD_CACHED,
        CHECKED_LIMIT: KVHOLD_CACHED,
    }
