from kvhold.tiers.redis.settings import RedisConfig
from kvhold.tiers.redis.tier import RedisTier

__all__ = ["RedisConfig", "RedisTier"]
