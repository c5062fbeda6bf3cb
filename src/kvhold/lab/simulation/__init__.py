"""A whole kvhold in one thread under virtual time: node, clients, tiers and transfers, with faults
drawn from a seed.

    from kvhold.lab.simulation.run import simulate
    simulate(7).findings          # empty, or what went wrong; the same for the same seed

The code is the real one: connections, sessions, the cache's state, the mover, guards, frames. What
is simulated is what lies around it: time, threads, sockets, memory and the tiers' stores
(`docs/simulation.md`).
"""
