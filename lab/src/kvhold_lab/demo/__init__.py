"""`kvhold demo`: the gain of a hit, on a real engine."""
