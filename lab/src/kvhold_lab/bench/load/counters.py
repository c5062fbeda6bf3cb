import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

LOOKED_UP, FOUND, MISSED = (
    "vllm:kvhold_lookup_tokens_total",
    "vllm:kvhold_hit_tokens_total",
    "vllm:kvhold_missed_tokens_total",
)
OWN_HITS, LOADED = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
_LABELS = {LOOKED_UP: "", FOUND: "source", MISSED: "reason", OWN_HITS: "", LOADED: ""}

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Counts = Mapping[tuple[str, str], float]
"""`{(metric, value of its label, or ""): count}`, summed over engines and all other labels."""


@dataclass(frozen=True)
class Hits:
    """looked_up, by_tier, missed: by kvhold
    loaded: from the connector
    own: in the engine's prefix cache
    """

    looked_up: int
    by_tier: dict[str, int]
    missed: dict[str, int]
    loaded: int | None
    own: int | None


def read(page: str) -> Counts:
    counts: dict[tuple[str, str], float] = {}
    for line in page.splitlines():
        if (sample := _SAMPLE.fullmatch(line)) is None or (name := sample[1]) not in _LABELS:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        key = (
            name,
            dict(_LABEL.findall(sample[2] or "")).get(_LABELS[name], "") if _LABELS[name] else "",
        )
        counts[key] = counts.get(key, 0.0) + value
    return counts


def hits(before: Counts | None, after: Counts | None) -> Hits | None:
    if before is None or after is None or not any(name == LOOKED_UP for name, _ in after):
        return None
    grown = {key: round(value - before.get(key, 0.0)) for key, value in after.items()}
    if min(grown.values()) < 0:
        return None
    return Hits(
        looked_up=grown[LOOKED_UP, ""],
        by_tier={
            label: tokens for (name, label), tokens in grown.items() if name == FOUND and tokens
        },
        missed={
            label: tokens for (name, label), tokens in grown.items() if name == MISSED and tokens
        },
        loaded=grown.get((LOADED, "")),
        own=grown.get((OWN_HITS, "")),
    )
