"""`kvhold bench compare`: kvhold in a real vLLM beside every other way not to compute a text twice,
by working set, tier and reuse.

`command.py` is the command, `visits.py` who asks for which text when, `systems.py` the engines that
are compared, `lmcache.py` and `lmcache_in_vllm.py` what LMCache needs to be one of them, `run.py`
the rounds, `rows.py` what is made of the times, `report.py` how it is shown.
"""
