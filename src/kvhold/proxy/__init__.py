"""An OpenAI-compatible front for prefill and decode engines: `kvhold proxy`.

    server.py     accepts requests: keys, limits, the queue, draining
    forwarding.py sends one request to a prefill and a decode engine, with retries
    prompts.py    reads a request and makes both of its parts; no I/O
    handovers.py  the three protocols of handing KV over; no I/O
    engines.py    the engines and their load; chooses one; no I/O
    health.py     probes the engines

Its routing policy is the least load and the affinity of sessions. One event loop.
"""
