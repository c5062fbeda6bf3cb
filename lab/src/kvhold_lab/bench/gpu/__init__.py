"""`kvhold bench gpu`: kvhold's copies on a GPU, each with a limit from the same run.

Parts run on `cuda`, on `cpu` with the host's copier, and on `fake` with the device's copier and
late streams.
"""
