"""`kvhold bench vllm`: what kvhold costs and gains in a real vLLM, beside vLLM without it and
vLLM's own offloading.

`command.py` is the command, `systems.py` the engines that are compared, `run.py` the rounds,
`figures.py` what is made of the times, `report.py` how it is shown.
"""
