"""Other nodes as a tier: their chunks in memory and on their disks, found without asking."""

from kvhold.tiers.peers.tier import PeersConfig, PeersTier

__all__ = ["PeersConfig", "PeersTier"]
