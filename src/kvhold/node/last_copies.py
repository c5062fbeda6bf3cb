from kvhold.cache.state import CacheState
from kvhold.cache.transfer.tier_worker import TierWorker
from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import ConfigError


def evict_last_copies_last(
    config: ServePeersConfig, state: CacheState, tier_worker: TierWorker | None
) -> None:
    """Raises ConfigError."""
    if not config.last_copies:
        return
    tier = None if tier_worker is None else tier_worker.peers_tier
    if tier is None:
        raise ConfigError(
            "peers.last_copies: which chunks other nodes have is known from a tier of peers; add "
            "peers://host-a:7711 to tiers, or set peers.last_copies=false"
        )
    state.ram.spares.copies_of = tier.copies_of
