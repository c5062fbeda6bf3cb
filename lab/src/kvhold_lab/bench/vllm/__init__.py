"""`kvhold bench vllm`: the cost and gain of kvhold in a real vLLM."""
