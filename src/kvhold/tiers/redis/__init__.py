"""Chunks in Redis or Valkey. `tier.py` has the tier, `settings.py` its URLs and options."""

from kvhold.tiers.redis.settings import RedisConfig
from kvhold.tiers.redis.tier import RedisTier

__all__ = ["RedisConfig", "RedisTier"]
