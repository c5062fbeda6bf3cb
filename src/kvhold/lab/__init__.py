"""The laboratory: what measures kvhold, proves it and shows it, and the real engines and servers
that it starts for that.

`bench/` is what `kvhold bench` measures, `verify/` proves on a model that no answer changes,
`demo/` shows what a hit is worth, `simulate/` replays traces. Each has its command with it; what
serves a user's engine never imports any of this.
"""
