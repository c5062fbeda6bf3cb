"""Rows and differences of policies, from results whose numbers are known."""

from dataclasses import replace

import pytest

from kvhold_lab.bench.load.policy_rows import (
    compared,
    policy_difference,
    policy_row,
    tables,
)
from kvhold_lab.bench.load.report import render_table
from kvhold_lab.bench.load.work import Result
from tests.lab.bench.load.test_metrics import result


def asked(
    user: int, question: int, ttft_s: float, cached: int = 0, error: str | None = None
) -> Result:
    made = result(ttft_s=ttft_s, tokens=(100, 1, cached), error=error, late_s=0.25)
    return replace(made, labels={"user": user, "question": question})


LRU = [asked(user, question, 1.0 + user, 20) for user in range(30) for question in range(2)]
FASTER = [asked(user, question, 0.9 + user, 30) for user in range(30) for question in range(2)]


def test_a_row_has_means_sums_and_intervals_around_them() -> None:
    row = policy_row("lru", [*LRU, asked(99, 0, 5.0, error="timeout")])
    assert row is not None
    assert (row.requests, row.errors, row.prompt_tokens, row.hit_tokens) == (60, 1, 6_000, 1_200)
    assert (row.hit_share, row.hit_share_low, row.hit_share_high) == pytest.approx((0.2,) * 3)
    assert row.ttft_mean_s == pytest.approx(15.5)
    assert 11.0 < row.ttft_low_s < 14.0
    assert 17.0 < row.ttft_high_s < 20.0
    assert row.waited_mean_s == 0.25


def test_a_difference_is_of_pairs_and_far_narrower_than_the_means() -> None:
    difference = policy_difference("learned", FASTER[::-1], "lru", LRU)
    assert difference is not None
    assert difference.pairs == 60
    assert (
        difference.ttft_mean_s,
        difference.ttft_low_s,
        difference.ttft_high_s,
    ) == pytest.approx((-0.1,) * 3)
    assert difference.hit_share == pytest.approx(0.1)


def test_requests_that_one_policy_did_not_answer_are_no_pairs() -> None:
    others = [asked(0, 0, 9.0, error="timeout"), *LRU[1:]]
    difference = policy_difference("learned", FASTER, "lru", others)
    assert difference is not None
    assert difference.pairs == 59


def test_equal_requests_are_paired_in_their_order() -> None:
    own = [result(started_s=at, ttft_s=at + 1.0) for at in (0.0, 1.0)]
    other = [result(started_s=at, ttft_s=at + 2.0) for at in (1.0, 0.0)]
    difference = policy_difference("a", own, "b", other)
    assert difference is not None
    assert (difference.pairs, difference.ttft_mean_s) == (2, -1.0)


def test_pairs_with_equal_hits_are_told_apart() -> None:
    mixed = [*FASTER[:40], *LRU[40:]]
    difference = policy_difference("learned", mixed, "lru", LRU, equal_hits=True)
    assert difference is not None
    assert (difference.pairs, difference.hit_share, difference.ttft_mean_s) == (20, 0.0, 0.0)


def test_requests_of_one_user_are_drawn_together() -> None:
    apart = policy_row("a", [asked(n, 0, float(n % 10)) for n in range(100)])
    together = policy_row("a", [asked(n % 10, n, float(n % 10)) for n in range(100)])
    assert apart is not None
    assert together is not None
    assert apart.ttft_mean_s == together.ttft_mean_s
    assert together.ttft_high_s - together.ttft_low_s > 2 * (apart.ttft_high_s - apart.ttft_low_s)


def test_the_same_results_give_the_same_intervals() -> None:
    assert compared({"lru": LRU, "learned": FASTER}) == compared({"lru": LRU, "learned": FASTER})


def test_the_first_policy_is_what_others_are_compared_with() -> None:
    rows, differences = compared({"lru": LRU, "fifo": LRU, "learned": FASTER, "mru": []})
    assert [row.policy for row in rows] == ["lru", "fifo", "learned"]
    assert [(pair.policy, pair.minus, pair.equal_hits) for pair in differences] == [
        ("fifo", "lru", False),
        ("fifo", "lru", True),
        ("learned", "lru", False),
    ]
    text = "\n".join(render_table(title, cells) for title, cells in tables(rows, differences))
    assert "learned - lru" in text
    assert "-0.1000 to -0.1000" in text
