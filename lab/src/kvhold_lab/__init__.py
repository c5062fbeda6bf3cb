"""Measurements, proofs and demonstrations of kvhold. kvhold never imports this package."""
