"""`kvhold verify`: does a model answer the same with kvhold, and does its KV come back bit for bit?

`command.py` is the command; `paths.py` says in which ways a model is run, `prompts.py` what it is
asked, `run.py` runs it with and without the connector and judges, `ties.py` knows where the engine
itself might answer otherwise, `rows.py` is the result. `engine.py` is an engine in a child process,
of which `engine_child.py`, `messages.py` and `driver.py` are the child's side; `witness.py` is the
connector with a witness that the engine loads.
"""
