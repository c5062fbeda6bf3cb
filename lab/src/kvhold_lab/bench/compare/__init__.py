"""`kvhold bench compare`: kvhold in a real vLLM beside other caches, by working set, tier and
reuse.
"""
