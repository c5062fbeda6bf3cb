"""Where chunks live. The contract is in `base.py`, eviction in `policies/`."""
