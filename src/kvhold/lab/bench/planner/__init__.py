"""`kvhold bench planner`: is what the planner decides ever slower than the better of always loading
and always computing?

`command.py` is the command, `sample.py` what is asked, `run.py` the engines and the rounds,
`figures.py` what is made of the times.
"""
