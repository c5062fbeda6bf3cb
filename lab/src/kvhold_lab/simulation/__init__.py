"""A whole kvhold in one thread under virtual time, with faults drawn from a seed.

The code is real; time, threads, sockets, memory and stores are not (`docs/simulation.md`).
"""
