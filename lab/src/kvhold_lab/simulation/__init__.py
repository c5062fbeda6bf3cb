"""A whole kvhold in one thread under virtual time, with faults drawn from a seed
(`docs/simulation.md`).
"""
