from kvhold.node.client import NodeClient
from kvhold.node.start import connect, end_node

__all__ = ["NodeClient", "connect", "end_node"]
