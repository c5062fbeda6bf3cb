"""`kvhold bench load`: workloads and traces against any OpenAI-compatible server."""
