"""`kvhold bench pd`: prefill and decode on two real vLLMs."""
