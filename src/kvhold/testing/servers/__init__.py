"""Real servers on free loopback ports, for tests, benchmarks and fault runs: started here, stopped
by their own pid.
"""
