from kvhold.tiers.peers.tier import PeersConfig, PeersTier

__all__ = ["PeersConfig", "PeersTier"]
