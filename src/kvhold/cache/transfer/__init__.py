"""Chunks between memory and the tiers: promotion, write-behind, re-encoding."""
