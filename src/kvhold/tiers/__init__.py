"""Where chunks live: one file a tier, `base.py` the contract, `policies/` who is evicted first."""
