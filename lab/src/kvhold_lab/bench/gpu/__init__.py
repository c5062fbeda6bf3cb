"""`kvhold bench gpu`: kvhold's copies on a GPU."""
