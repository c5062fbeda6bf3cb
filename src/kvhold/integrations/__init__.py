"""One package per engine."""
