"""`kvhold bench quality`: what a lossy codec costs in answers.

`tasks.py` makes questions whose answers stand in the context alone, `writing.py` the same in words,
or takes a text; `model.py` loads a model and lets its KV be taken out and put back, `passing.py`
puts KV through a codec as a tier does, `measure.py` compares, `report.py` shows, `command.py` is
the command. The small model that is asked by default is in a checkout, in benchmarks/quality.
"""
