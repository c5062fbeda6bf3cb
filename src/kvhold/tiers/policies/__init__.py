"""Eviction policies by name: `make_policy("lru")`."""

from collections.abc import Callable

from kvhold.tiers.policies.base import Policy
from kvhold.tiers.policies.fifo import FifoPolicy
from kvhold.tiers.policies.learned import LearnedPolicy
from kvhold.tiers.policies.lfu import LfuPolicy
from kvhold.tiers.policies.lru import LruPolicy
from kvhold.tiers.policies.mru import MruPolicy
from kvhold.tiers.policies.s3fifo import S3FifoPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "fifo": FifoPolicy,
    "mru": MruPolicy,
    "s3fifo": S3FifoPolicy,
    "learned": LearnedPolicy,
}
# `learned` must be told of lookups: of all tiers, only a node's disks are
TIER_POLICIES = tuple(name for name in POLICIES if name != "learned")

__all__ = [
    "POLICIES",
    "TIER_POLICIES",
    "FifoPolicy",
    "LearnedPolicy",
    "LfuPolicy",
    "LruPolicy",
    "MruPolicy",
    "Policy",
    "S3FifoPolicy",
    "make_policy",
]


def make_policy(name: str) -> Policy:
    return POLICIES[name]()
