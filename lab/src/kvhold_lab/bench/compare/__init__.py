"""`kvhold bench compare`: kvhold in a real vLLM beside other caches."""
