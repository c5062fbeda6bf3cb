"""Tiers: the places of chunks. The contract is in `base.py`, eviction in `policies/`."""
