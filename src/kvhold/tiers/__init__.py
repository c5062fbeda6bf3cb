"""`base.py` has the contract, `policies/` the eviction."""
