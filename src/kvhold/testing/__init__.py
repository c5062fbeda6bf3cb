"""Conformance suites for whoever writes a tier, codec, policy or cache: each kind has one pytest
class that every one must pass.

    from kvhold.testing import TierContract

    class TestMyTier(TierContract):
        @pytest.fixture
        async def tier(self): ...

Needs pytest, pytest-asyncio and hypothesis. Nothing else of kvhold imports this package.
"""

import pytest

# Failing asserts then show their values, in a plugin's own repository too. Goes before the suites
# are imported.
pytest.register_assert_rewrite(
    "kvhold.testing.cache", "kvhold.testing.codec", "kvhold.testing.policy", "kvhold.testing.tier"
)

from kvhold.testing.cache import CacheContract  # noqa: E402
from kvhold.testing.codec import CodecContract  # noqa: E402
from kvhold.testing.policy import PolicyContract  # noqa: E402
from kvhold.testing.tier import TierContract  # noqa: E402

__all__ = ["CacheContract", "CodecContract", "PolicyContract", "TierContract"]
