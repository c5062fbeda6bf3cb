"""`kvhold bench compare-engines`: kvhold and LMCache without an engine."""
