"""A whole kvhold in one thread under virtual time, with faults drawn from a seed.

    from kvhold_lab.simulation.run import simulate
    simulate(7).findings          # always the same for one seed

The code is real; time, threads, sockets, memory and stores are not (`docs/simulation.md`).
"""
