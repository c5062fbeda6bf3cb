from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import numpy as np
import numpy.typing as npt

from kvhold_lab.bench.load.work import COLD, WARM, Result


@dataclass(frozen=True)
class Spread:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: "Sequence[float] | npt.NDArray[np.float64]") -> "Spread | None":
        if not len(values):
            return None
        array = np.asarray(values)
        return cls(
            float(array.mean()), *(float(value) for value in np.percentile(array, (50, 90, 99)))
        )


@dataclass(frozen=True)
class Figures:
    """duration_s: from the first start to the last end, with failures
    busy_s: with a successful request in flight
    late_s: from arrival to sending
    decode_tokens_s: output tokens a second after the first
    input_tokens, cached_tokens: reported by the server
    """

    requests: int
    errors: dict[str, int]
    duration_s: float
    busy_s: float
    requests_s: float
    input_tokens: int | None
    input_tokens_s: float | None
    output_tokens: int
    output_tokens_s: float
    cached_tokens: int | None
    ttft_s: Spread | None
    itl_s: Spread | None
    latency_s: Spread | None
    decode_tokens_s: Spread | None
    late_s: Spread | None
    score: float | None


@dataclass(frozen=True)
class Gains:
    ttft: float
    latency: float


def figures(results: Sequence[Result]) -> Figures:
    good = [result for result in results if result.reply.error is None]
    replies = [result.reply for result in good]
    duration_s = max(result.started_s + result.reply.latency_s for result in results) - min(
        result.started_s for result in results
    )
    input_tokens = _sum([reply.input_tokens for reply in replies])
    output_tokens = sum(reply.output_tokens for reply in replies)
    scores = [result.score for result in good if result.score is not None]
    decoding = [
        (reply.output_tokens - 1, reply.latency_s - reply.ttft_s)
        for reply in replies
        if reply.ttft_s is not None
    ]
    return Figures(
        requests=len(good),
        errors=dict(
            Counter(result.reply.error for result in results if result.reply.error is not None)
        ),
        duration_s=duration_s,
        busy_s=_covered(
            [(result.started_s, result.started_s + result.reply.latency_s) for result in good]
        ),
        requests_s=_rate(len(good), duration_s),
        input_tokens=input_tokens,
        input_tokens_s=_rate(input_tokens, duration_s) if input_tokens is not None else None,
        output_tokens=output_tokens,
        output_tokens_s=_rate(output_tokens, duration_s),
        cached_tokens=_sum([reply.cached_tokens for reply in replies]),
        ttft_s=Spread.of([reply.ttft_s for reply in replies if reply.ttft_s is not None]),
        itl_s=Spread.of(
            np.fromiter(chain.from_iterable(reply.gaps_s for reply in replies), dtype=np.float64)
        ),
        latency_s=Spread.of([reply.latency_s for reply in replies]),
        decode_tokens_s=Spread.of(
            [tokens / seconds for tokens, seconds in decoding if tokens > 0 and seconds > 0]
        ),
        late_s=Spread.of([result.late_s for result in good if result.late_s is not None]),
        score=fmean(scores) if scores else None,
    )


def by_group(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.started_s):
        groups.setdefault(result.group, []).append(result)
    return groups


def gains(groups: dict[str, Figures]) -> Gains | None:
    cold, warm = groups.get(COLD), groups.get(WARM)
    if cold is None or warm is None or cold.ttft_s is None or warm.ttft_s is None:
        return None
    return Gains(
        ttft=cold.ttft_s.mean / warm.ttft_s.mean,
        latency=(cold.busy_s / cold.requests) / (warm.busy_s / warm.requests),
    )


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    total = end = 0.0
    for begins, ends in sorted(spans):
        total += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    return total


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0
