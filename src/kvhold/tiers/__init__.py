"""Where chunks live.

One file or folder per tier, the contract in `base.py`, eviction in `policies/`.
"""
