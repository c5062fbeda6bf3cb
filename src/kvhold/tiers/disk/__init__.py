"""The disk tier.

`tier.py` spreads the keys over disks. `store.py` is one disk, `folder.py` has its files, and
`index.py` counts their bytes.
"""

from kvhold.tiers.disk.tier import DiskConfig, DiskTier

__all__ = ["DiskConfig", "DiskTier"]
