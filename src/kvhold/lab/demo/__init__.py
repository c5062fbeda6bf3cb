"""`kvhold demo`: what a hit is worth, on a real engine and a model made here.

`command.py` is the command, `run.py` what it measures, `report.py` how it is shown.
"""
