"""`tier.py` spreads keys over disks; `store.py` is one disk."""

from kvhold.tiers.disk.tier import DiskConfig, DiskTier

__all__ = ["DiskConfig", "DiskTier"]
