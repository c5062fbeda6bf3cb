"""Chunks in Redis or Valkey. `tier.py` is the tier; `settings.py` says how it is addressed; `stream.py` and `pool.py` know no Redis."""

from kvhold.tiers.redis.settings import RedisConfig
from kvhold.tiers.redis.tier import RedisTier

__all__ = ["RedisConfig", "RedisTier"]
