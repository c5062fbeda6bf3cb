from collections.abc import Sequence

RECOMPUTE = "recompute"
PLAIN = "vllm"
AGAIN = "vllm, again"
LIMIT = "vllm, all in memory"
OFFLOADING = "offloading"
LMCACHE = "lmcache"
KVHOLD = "kvhold"
ALONE = "kvhold, no prefix cache"
LEFT_ALONE = "kvhold, left alone"
LEFT_AGAIN = "kvhold, left alone again"
LAYERWISE = "kvhold, layer by layer"
BESIDE = "kvhold, beside the passes"
UNCHECKED = "kvhold, unchecked"
CHECKED_AGAIN = "kvhold, checked again"
SYSTEMS = (
    RECOMPUTE,
    PLAIN,
    AGAIN,
    OFFLOADING,
    LMCACHE,
    KVHOLD,
    ALONE,
    LEFT_ALONE,
    LEFT_AGAIN,
    LAYERWISE,
    BESIDE,
    UNCHECKED,
    CHECKED_AGAIN,
    LIMIT,
)
COPIES = (LEFT_ALONE, LEFT_AGAIN, UNCHECKED, CHECKED_AGAIN)
WITH_TIERS = (LMCACHE, KVHOLD, ALONE)
TIERS = ("ram", "disk", "redis")


def key(name: str, tier: str) -> str:
    return f"{name}, {tier}" if name in WITH_TIERS else name


def is_ours(name: str) -> bool:
    return name.startswith(KVHOLD)


def num_asked(systems: Sequence[str], tiers: Sequence[str]) -> int:
    return sum(len(tiers) if name in WITH_TIERS else 1 for name in systems if name not in COPIES)
