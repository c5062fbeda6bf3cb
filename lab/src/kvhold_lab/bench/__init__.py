"""Measurements of kvhold's parts, each beside a limit measured in the same run."""
