"""Long runs: damage by the hundred thousand, kills by the thousand, a server that keeps dying,
random requests by the ten thousand.
"""
