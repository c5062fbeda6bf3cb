"""`kvhold bench compare-engines`: kvhold beside LMCache without an engine."""
