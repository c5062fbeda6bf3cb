"""`kvhold bench load`: workloads against any OpenAI-compatible server, and a recorded trace sent
again.

`command.py` is the command, `workloads/` what is sent, `prompts.py` what it is made of, `runner.py`
and `measure.py` when it is sent, `client.py` and `events.py` how, `metrics.py` and `counters.py`
what is made of the answers, `report.py` and `pictures.py` how it is shown.
"""
