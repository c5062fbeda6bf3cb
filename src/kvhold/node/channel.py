"""The settings of the channel between a node's memory and its peers."""

from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.memory.arena import Arena
from kvhold.net.nixl_agent import MISSING, NixlAgent, is_installed
from kvhold.net.remote_memory import RemoteMemory
from kvhold.tiers.peers.channel import NIXL, TCP, ChannelPlan

_NO_PEERS = "this node has no peers"


def plan_channel(config: Config, arena: Arena) -> ChannelPlan:
    """Raises ConfigError: `peers.channel` needs a missing package."""
    channel = config.peers.channel
    if channel == TCP:
        return ChannelPlan()
    if not config.peers.listen and not any(
        "peers" in tier.partition("://")[0] for tier in config.tiers
    ):
        return ChannelPlan(reason=_NO_PEERS)
    if not is_installed():
        if channel == NIXL:
            raise ConfigError(f"peers.channel = {channel!r}: {MISSING}; or set it to auto")
        return ChannelPlan(reason=MISSING)
    memory = RemoteMemory(NixlAgent, arena.buffer)
    return ChannelPlan(memory, "", is_measured=channel != NIXL)
