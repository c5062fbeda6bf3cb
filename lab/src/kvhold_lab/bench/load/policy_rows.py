"""Intervals are of 95 %, by bootstrap over users."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from kvhold_lab.bench.load.work import Result

_RESAMPLES = 4_000


@dataclass(frozen=True)
class PolicyRow:
    """hit_tokens: prompt tokens that the server did not compute
    ttft_low_s, ttft_high_s: interval of the mean
    """

    policy: str
    requests: int
    errors: int
    prompt_tokens: int
    hit_tokens: int
    hit_share: float
    hit_share_low: float
    hit_share_high: float
    ttft_mean_s: float
    ttft_low_s: float
    ttft_high_s: float
    waited_mean_s: float


@dataclass(frozen=True)
class PolicyDifference:
    """equal_hits: only pairs with equal hits, to compare the servers
    hit_share: of the prompt tokens
    """

    policy: str
    minus: str
    equal_hits: bool
    pairs: int
    hit_share: float
    hit_share_low: float
    hit_share_high: float
    ttft_mean_s: float
    ttft_low_s: float
    ttft_high_s: float


@dataclass(frozen=True)
class _Estimate:
    value: float
    low: float
    high: float


def policy_row(policy: str, results: Sequence[Result]) -> PolicyRow | None:
    good = list(_answered(results).values())
    if not good:
        return None
    users = [_user(result, at) for at, result in enumerate(good)]
    prompt_tokens = [_prompt_tokens(result) for result in good]
    hit_tokens = [_hit_tokens(result) for result in good]
    share = _ratio(hit_tokens, prompt_tokens, users)
    ttft = _ratio([_ttft_s(result) for result in good], [1] * len(good), users)
    return PolicyRow(
        policy=policy,
        requests=len(good),
        errors=sum(result.reply.error is not None for result in results),
        prompt_tokens=sum(prompt_tokens),
        hit_tokens=sum(hit_tokens),
        hit_share=share.value,
        hit_share_low=share.low,
        hit_share_high=share.high,
        ttft_mean_s=ttft.value,
        ttft_low_s=ttft.low,
        ttft_high_s=ttft.high,
        waited_mean_s=fmean(result.late_s or 0.0 for result in good),
    )


def policy_difference(
    policy: str,
    results: Sequence[Result],
    minus: str,
    others: Sequence[Result],
    *,
    equal_hits: bool = False,
) -> PolicyDifference | None:
    own, other = _answered(results), _answered(others)
    pairs = [(own[key], other[key]) for key in own if key in other]
    if equal_hits:
        pairs = [(one, two) for one, two in pairs if _hit_tokens(one) == _hit_tokens(two)]
    if not pairs:
        return None
    users = [_user(result, at) for at, (result, _) in enumerate(pairs)]
    share = _ratio(
        [_hit_tokens(one) - _hit_tokens(two) for one, two in pairs],
        [_prompt_tokens(one) for one, _ in pairs],
        users,
    )
    ttft = _ratio([_ttft_s(one) - _ttft_s(two) for one, two in pairs], [1] * len(pairs), users)
    return PolicyDifference(
        policy=policy,
        minus=minus,
        equal_hits=equal_hits,
        pairs=len(pairs),
        hit_share=share.value,
        hit_share_low=share.low,
        hit_share_high=share.high,
        ttft_mean_s=ttft.value,
        ttft_low_s=ttft.low,
        ttft_high_s=ttft.high,
    )


def compared(
    results: Mapping[str, Sequence[Result]],
) -> tuple[list[PolicyRow], list[PolicyDifference]]:
    first, *others = results
    rows = [policy_row(policy, own) for policy, own in results.items()]
    differences = [
        policy_difference(policy, results[policy], first, results[first], equal_hits=equal_hits)
        for policy in others
        for equal_hits in (False, True)
    ]
    return [row for row in rows if row], [pair for pair in differences if pair]


def tables(
    rows: Sequence[PolicyRow], differences: Sequence[PolicyDifference]
) -> Iterator[tuple[str, list[list[str]]]]:
    heading = "requests,errors,prompt tokens,hit tokens,hit share %,95 %,mean TTFT s,95 %,waited s"
    yield (
        "policy",
        [
            ["", *heading.split(",")],
            *(
                [
                    row.policy,
                    f"{row.requests:,}",
                    f"{row.errors:,}",
                    f"{row.prompt_tokens:,}",
                    f"{row.hit_tokens:,}",
                    f"{100 * row.hit_share:.1f}",
                    f"{100 * row.hit_share_low:.1f} to {100 * row.hit_share_high:.1f}",
                    f"{row.ttft_mean_s:.4f}",
                    f"{row.ttft_low_s:.4f} to {row.ttft_high_s:.4f}",
                    f"{row.waited_mean_s:.3f}",
                ]
                for row in rows
            ),
        ],
    )
    if differences:
        yield (
            "difference by pairs",
            [
                ["", "pairs", "hit share, points", "95 %", "mean TTFT s", "95 %"],
                *(
                    [
                        f"{pair.policy} - {pair.minus}{', equal hits' * pair.equal_hits}",
                        f"{pair.pairs:,}",
                        f"{100 * pair.hit_share:+.1f}",
                        f"{100 * pair.hit_share_low:+.1f} to {100 * pair.hit_share_high:+.1f}",
                        f"{pair.ttft_mean_s:+.4f}",
                        f"{pair.ttft_low_s:+.4f} to {pair.ttft_high_s:+.4f}",
                    ]
                    for pair in differences
                ),
            ],
        )


def _answered(results: Sequence[Result]) -> dict[Hashable, Result]:
    found: dict[Hashable, Result] = {}
    seen: Counter[Hashable] = Counter()
    for result in sorted(results, key=lambda result: result.started_s):
        key = result.group, tuple(sorted(result.labels.items()))
        seen[key] += 1
        if result.reply.error is None and result.reply.ttft_s is not None:
            found[key, seen[key]] = result
    return found


def _user(result: Result, at: int) -> Hashable:
    return ("user", result.labels["user"]) if "user" in result.labels else at


def _prompt_tokens(result: Result) -> int:
    return result.reply.input_tokens or 0


def _hit_tokens(result: Result) -> int:
    return result.reply.cached_tokens or 0


def _ttft_s(result: Result) -> float:
    assert result.reply.ttft_s is not None
    return result.reply.ttft_s


def _ratio(over: Sequence[float], under: Sequence[float], users: Sequence[Hashable]) -> _Estimate:
    numbers: dict[Hashable, int] = {}
    at = [numbers.setdefault(user, len(numbers)) for user in users]
    sums = np.zeros((2, len(numbers)))
    np.add.at(sums[0], at, over)
    np.add.at(sums[1], at, under)
    drawn = np.random.default_rng(0).integers(len(numbers), size=(_RESAMPLES, len(numbers)))
    overs, unders = sums[:, drawn].sum(axis=2)
    low, high = np.percentile(overs / np.maximum(unders, 1e-9), (2.5, 97.5))
    whole = sums.sum(axis=1)
    return _Estimate(float(whole[0] / max(whole[1], 1e-9)), float(low), float(high))
