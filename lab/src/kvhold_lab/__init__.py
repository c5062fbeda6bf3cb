"""Measurements, proofs and demonstrations of kvhold, which itself never imports this package."""
