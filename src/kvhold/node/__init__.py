"""The daemon of one host around one cache, and the client that speaks to it."""

from kvhold.node.client import NodeClient
from kvhold.node.start import connect

__all__ = ["NodeClient", "connect"]
