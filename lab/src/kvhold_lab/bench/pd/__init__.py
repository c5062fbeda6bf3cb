"""`kvhold bench pd`: prefill and decode on two real vLLMs, with faults, and how fast."""
