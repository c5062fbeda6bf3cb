"""The HTTP API of one host's node: `kvhold control`.

It speaks to the node as any client does. It needs `kvhold[control]`.
"""
