"""Measurements of kvhold's parts, each with a limit measured in the same run."""
