"""Figures of results whose numbers are known."""

from array import array

import pytest

from kvhold_lab.bench.load.counters import Hits, hits, read
from kvhold_lab.bench.load.metrics import Spread, by_group, figures, gains
from kvhold_lab.bench.load.work import COLD, WARM, Reply, Result


def result(
    group: str = "g",
    started_s: float = 0.0,
    latency_s: float = 1.0,
    ttft_s: float | None = 0.5,
    *,
    error: str | None = None,
    gaps_s: tuple[float, ...] = (),
    tokens: tuple[int | None, int, int | None] = (10, 3, 4),
    late_s: float | None = None,
    score: float | None = None,
) -> Result:
    given, made, cached = tokens
    reply = Reply(
        latency_s=latency_s,
        ttft_s=ttft_s,
        gaps_s=array("d", gaps_s),
        input_tokens=given,
        output_tokens=made,
        cached_tokens=cached,
        error=error,
    )
    return Result(group, {}, started_s, late_s, reply, score)


def test_a_spread_is_linear_between_values() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert spread is not None
    assert (spread.mean, spread.p50) == (22.0, 3.0)
    assert spread.p90 == pytest.approx(61.6)
    assert spread.p99 == pytest.approx(96.16)
    assert Spread.of([]) is None


def test_times_and_rates_are_of_what_succeeded_and_errors_are_counted_beside() -> None:
    own = figures(
        [
            result(
                started_s=1.0, latency_s=2.0, ttft_s=0.5, gaps_s=(0.1, 0.3), late_s=0.0, score=1.0
            ),
            result(started_s=2.0, latency_s=3.0, ttft_s=1.5, gaps_s=(0.2,), late_s=0.4, score=0.0),
            result(
                started_s=0.0, latency_s=0.5, ttft_s=None, error="http 503", tokens=(None, 0, None)
            ),
            result(started_s=9.0, latency_s=1.0, ttft_s=0.1, error="timeout"),
            result(started_s=9.0, latency_s=1.0, ttft_s=0.1, error="timeout"),
        ]
    )
    assert (own.requests, own.errors) == (2, {"http 503": 1, "timeout": 2})
    assert (own.duration_s, own.requests_s) == (10.0, 0.2)
    assert own.busy_s == 4.0
    assert (
        own.input_tokens,
        own.input_tokens_s,
        own.output_tokens,
        own.output_tokens_s,
        own.cached_tokens,
    ) == (20, 2.0, 6, 0.6, 8)
    assert own.ttft_s is not None
    assert (own.ttft_s.mean, own.ttft_s.p50) == (1.0, 1.0)
    assert own.itl_s is not None
    assert own.itl_s.p50 == pytest.approx(0.2)
    assert own.latency_s is not None
    assert own.latency_s.mean == 2.5
    assert own.decode_tokens_s is not None
    assert own.decode_tokens_s.mean == pytest.approx(2 / 1.5)
    assert own.late_s is not None
    assert own.late_s.mean == pytest.approx(0.2)
    assert own.score == 0.5


def test_a_sum_with_an_unknown_is_unknown() -> None:
    own = figures([result(tokens=(10, 1, None)), result(tokens=(None, 1, 4))])
    assert (own.input_tokens, own.input_tokens_s, own.cached_tokens) == (None, None, None)


def test_only_errors_are_figures_too() -> None:
    own = figures([result(error="connect", ttft_s=None, latency_s=0.0)])
    assert (own.requests, own.requests_s, own.output_tokens_s, own.ttft_s, own.itl_s) == (
        0,
        0.0,
        0.0,
        None,
        None,
    )


def test_gains_are_of_means_and_of_rounds() -> None:
    results = [
        *(
            result(COLD, started_s=start, latency_s=4.0, ttft_s=2.0) for start in (0.0, 2.0)
        ),  # a round of 6 s for 2
        *(
            result(WARM, started_s=start, latency_s=1.0, ttft_s=0.25)
            for start in (10.0, 11.0, 12.0, 20.0)
        ),  # 4 s for 4, and a gap
    ]
    groups = {name: figures(own) for name, own in by_group(results).items()}
    assert list(groups) == [COLD, WARM]
    found = gains(groups)
    assert found is not None
    assert (found.ttft, found.latency) == (8.0, 3.0)
    late = result(COLD, started_s=1.0, latency_s=600.0, error="timeout")
    assert gains(groups | {COLD: figures([*results[:2], late])}) == found, (
        "times are of those that succeeded"
    )
    assert gains({COLD: groups[COLD]}) is None
    assert gains({COLD: groups[COLD], WARM: figures([result(WARM, error="timeout")])}) is None


PAGE = """# HELP vllm:kvhold_hit_tokens_total Prompt tokens
# TYPE vllm:kvhold_hit_tokens_total counter
vllm:kvhold_lookup_tokens_total{engine="0",model_name="m"} 1000.0
vllm:kvhold_lookup_tokens_total{engine="1",model_name="m"} 500.0
vllm:kvhold_hit_tokens_total{engine="0",model_name="a \\"b\\", source=\\"x\\"",source="ram"} 256.0
vllm:kvhold_hit_tokens_total{engine="1",source="ram"} 128.0
vllm:kvhold_hit_tokens_total{engine="0",source="disk"} 1.28e+02
vllm:kvhold_missed_tokens_total{engine="0",reason="never_stored"} 988
vllm:prefix_cache_hits_total{engine="0"} 64.0
vllm:external_prefix_cache_hits_total{engine="0"} 384.0 1700000000000
vllm:kvhold_loads_total{engine="0"} NaN
vllm:prefix_cache_hits_total{engine="9"} NaN
vllm:prefix_cache_hits_total{engine="9"} what?
nonsense
"""


def test_counters_are_summed_over_engines_and_kept_apart_by_tier() -> None:
    assert hits({}, read(PAGE)) == Hits(
        looked_up=1_500,
        by_tier={"ram": 384, "disk": 128},
        missed={"never_stored": 988},
        loaded=384,
        own=64,
    )


def test_hits_are_what_was_counted_between_two_readings() -> None:
    before, after = read(PAGE), read(PAGE.replace("256.0", "512.0").replace("1000.0", "2000.0"))
    assert hits(before, after) == Hits(
        looked_up=1_000, by_tier={"ram": 256}, missed={}, loaded=0, own=0
    )


def test_a_server_without_kvhold_has_no_hits_to_tell() -> None:
    assert hits({}, read('vllm:prefix_cache_hits_total{engine="0"} 64.0\n')) is None
    assert hits({}, {}) is None


def test_a_page_that_could_not_be_read_and_a_server_that_began_anew_have_no_hits_to_tell() -> None:
    before, after = read(PAGE), read(PAGE.replace("256.0", "512.0").replace("1000.0", "2000.0"))
    assert hits(None, after) is None and hits(before, None) is None
    assert hits(after, before) is None
