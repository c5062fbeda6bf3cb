"""Conformance suites for tiers, codecs, policies and caches: one pytest class each.

Needs pytest, pytest-asyncio and hypothesis.
"""

import pytest

# before the imports, so that failed asserts show values, for plugins too
pytest.register_assert_rewrite(
    "kvhold.testing.cache",
    "kvhold.testing.cache_contract",
    "kvhold.testing.cache_lookups",
    "kvhold.testing.cache_spans",
    "kvhold.testing.cache_stores",
    "kvhold.testing.codec",
    "kvhold.testing.policy",
    "kvhold.testing.tier",
    "kvhold.testing.tier_contract",
    "kvhold.testing.tier_replaces",
)

from kvhold.testing.cache_contract import CacheContract  # noqa: E402
from kvhold.testing.codec import CodecContract  # noqa: E402
from kvhold.testing.policy import PolicyContract  # noqa: E402
from kvhold.testing.tier_contract import TierContract  # noqa: E402

__all__ = ["CacheContract", "CodecContract", "PolicyContract", "TierContract"]
