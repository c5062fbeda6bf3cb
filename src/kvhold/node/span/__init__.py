"""An engine on several hosts: one lookup asks each host's node."""

from kvhold.node.span.hosts import OtherHosts, OwnHost, RelayPlace
from kvhold.node.span.lookup import Span, SpanHit
from kvhold.node.span.relay import Relay

__all__ = ["OtherHosts", "OwnHost", "Relay", "RelayPlace", "Span", "SpanHit"]
