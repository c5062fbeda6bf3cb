"""The disk tier: `tier.py` spreads keys over disks, `store.py` is one of them, `folder.py` its files, `index.py` its account."""

from kvhold.tiers.disk.tier import DiskConfig, DiskTier

__all__ = ["DiskConfig", "DiskTier"]
