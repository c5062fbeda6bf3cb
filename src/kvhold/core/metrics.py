"""An unknown name or label raises KeyError.

One thread writes. Another may `add` only while it keeps the GIL.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import TypeAlias

from kvhold.core.metrics_table import TABLE as TABLE
from kvhold.core.metrics_table import Metric as Metric

_Key: TypeAlias = tuple[str, tuple[str, ...]]  # name, values of its labels


@dataclass(frozen=True)
class Sample:
    """counts: a histogram's observations, cumulative by bucket; `value` is their sum."""

    metric: Metric
    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


class Metrics:
    def __init__(self) -> None:
        self._values: dict[_Key, float] = {}
        self._counts: dict[_Key, list[int]] = {}
        self._shown: dict[_Key, _Shown] = {}

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
        for shown, value, counts in self._now():
            yield Sample(shown.metric, shown.labels, value, counts)

    def as_dict(self) -> dict[str, float]:
        """{"name{label=value}": value}"""
        flat: dict[str, float] = {}
        for shown, value, counts in self._now():
            if counts:
                flat[shown.count_name] = counts[-1]
                flat[shown.sum_name] = value
            else:
                flat[shown.name] = value
        return flat

    def _now(self) -> Iterator[tuple["_Shown", float, tuple[int, ...]]]:
        values, all_shown = dict(self._values), self._shown
        if all_shown.keys() != values.keys():
            all_shown = self._shown = _in_order(values)
        for key, shown in all_shown.items():
            counts = tuple(accumulate(self._counts.get(key, ()))) if shown.metric.buckets else ()
            yield shown, values[key], counts


class _Shown:
    __slots__ = ("count_name", "labels", "metric", "name", "sum_name")

    def __init__(self, metric: Metric, labels: tuple[str, ...]) -> None:
        pairs = ",".join(f"{k}={v}" for k, v in zip(metric.labels, labels, strict=True))
        braces = f"{{{pairs}}}" if pairs else ""
        self.metric, self.labels = metric, labels
        self.name = f"{metric.name}{braces}"
        self.count_name = f"{metric.name}_count{braces}"
        self.sum_name = f"{metric.name}_sum{braces}"


def _in_order(keys: Iterable[_Key]) -> dict[_Key, _Shown]:
    order = {name: i for i, name in enumerate(TABLE)}
    ordered = sorted(keys, key=lambda key: (order[key[0]], key[1]))
    return {key: _Shown(TABLE[key[0]], key[1]) for key in ordered}


def merged_samples(sources: Iterable[Metrics]) -> list[Sample]:
    """Of several threads; equal ones are added."""
    merged: dict[_Key, Sample] = {}
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
