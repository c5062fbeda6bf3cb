"""Real engines as child processes, and what they are given to do.

`engine.py` is our side of one and `engine_child.py` its own, over the pipes of `process.py` with
the records of `messages.py`; behind it is vLLM (`vllm_engine.py`, stepped by hand in `stepped.py`)
or transformers (`transformers_engine.py`). `openai_server.py` is vLLM's own server. `models.py`
makes small models of a wanted size, `prompts.py` prompts of an exact length.
"""
