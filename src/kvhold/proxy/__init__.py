"""An OpenAI-compatible front for prefill and decode engines: `kvhold proxy`.

Its routing policy is the least load and the affinity of sessions. One event loop.
"""
