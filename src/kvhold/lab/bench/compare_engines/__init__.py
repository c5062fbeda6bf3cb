"""`kvhold bench compare-engines`: kvhold beside LMCache without an engine around them, on the same
tokens, bytes and tiers.

`command.py` is the command, `lmcache_env.py` LMCache's own environment, `child.py` a process with
one cache in it, `kvhold_child.py` and `lmcache_child.py` what it drives, `systems.py` our side of
these processes, `tier_limits.py` what no cache can beat on a disk or in a Redis, `run.py` the
rounds, `rows.py` what is made of the times.
"""
