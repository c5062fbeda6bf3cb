"""What a vLLM engine's KV is named by: see `walk.py` for the facts, `tables.py` and
`environment.py` for what is left out and why.
"""

from kvhold.integrations.vllm.naming.walk import engine_facts

__all__ = ["engine_facts"]
