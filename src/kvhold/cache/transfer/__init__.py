"""Chunks between memory and tiers."""
