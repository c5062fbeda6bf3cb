"""`kvhold bench compare`: kvhold and other caches in a real vLLM."""
