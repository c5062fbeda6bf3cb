"""An engine whose workers are on several hosts: one lookup asks each host's node.

A node has only a Unix socket, so a worker of its host relays the lookups.
"""

from kvhold.node.span.hosts import OtherHosts, OwnHost, RelayPlace
from kvhold.node.span.lookup import Span, SpanHit
from kvhold.node.span.relay import Relay

__all__ = ["OtherHosts", "OwnHost", "Relay", "RelayPlace", "Span", "SpanHit"]
