"""Tiers: the places where chunks live. `base.py` has the contract, `policies/` the eviction."""
