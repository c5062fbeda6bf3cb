"""An unknown name or label raises KeyError.

One thread writes. Another may `add` only if it keeps the GIL during both dictionary steps.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from kvhold.core.metrics_table import TABLE as TABLE
from kvhold.core.metrics_table import Metric as Metric


@dataclass(frozen=True)
class Sample:
    """counts: a histogram's observations, cumulative by bucket; `value` is their sum."""

    metric: Metric
    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


class Metrics:
    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, _ordered(name, labels))
        self._values[key] = self._values.get(key, 0) + amount

    def observe(self, name: str, amount: float, **labels: str) -> None:
        buckets, key = TABLE[name].buckets, (name, _ordered(name, labels))
        counts = self._counts.setdefault(key, [0] * (len(buckets) + 1))
        counts[bisect_left(buckets, amount)] += 1
        self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        self._values[name, _ordered(name, labels)] = value

    def forget(self, label: str, value: str) -> None:
        for name, labels in list(self._values):
            names = TABLE[name].labels
            if label in names and labels[names.index(label)] == value:
                del self._values[name, labels]
                self._counts.pop((name, labels), None)

    def value(self, name: str, **labels: str) -> float:
        return self._values.get((name, _ordered(name, labels)), 0)

    def samples(self) -> Iterator[Sample]:
        order = {name: i for i, name in enumerate(TABLE)}
        values = dict(self._values)
        for name, labels in sorted(values, key=lambda key: (order[key[0]], key[1])):
            counts = tuple(accumulate(self._counts.get((name, labels), ())))
            yield Sample(TABLE[name], labels, values[name, labels], counts)

    def as_dict(self) -> dict[str, float]:
        """{"name{label=value}": value}"""
        flat: dict[str, float] = {}
        for sample in self.samples():
            pairs = ",".join(
                f"{k}={v}" for k, v in zip(sample.metric.labels, sample.labels, strict=True)
            )
            braces = f"{{{pairs}}}" if pairs else ""
            if sample.counts:
                flat[f"{sample.metric.name}_count{braces}"] = sample.counts[-1]
                flat[f"{sample.metric.name}_sum{braces}"] = sample.value
            else:
                flat[f"{sample.metric.name}{braces}"] = sample.value
        return flat


def merged_samples(sources: Iterable[Metrics]) -> list[Sample]:
    """Of several threads; equal ones are added."""
    merged: dict[tuple[str, tuple[str, ...]], Sample] = {}
    for source in sources:
        for sample in source.samples():
            key = (sample.metric.name, sample.labels)
            if (other := merged.get(key)) is not None:
                pairs = zip_longest(other.counts, sample.counts, fillvalue=0)
                sample = replace(
                    sample,
                    value=other.value + sample.value,
                    counts=tuple(one + two for one, two in pairs),
                )
            merged[key] = sample
    return list(merged.values())


def _ordered(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    metric = TABLE[name]
    if len(labels) != len(metric.labels):
        raise KeyError(f"{name} has the labels {metric.labels}, not {tuple(labels)}")
    return tuple(map(labels.__getitem__, metric.labels))
