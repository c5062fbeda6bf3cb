"""An OpenAI-compatible front for prefill and decode engines: `kvhold proxy`. One event loop."""
