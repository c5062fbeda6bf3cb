"""An engine on several hosts: one lookup asks each host's node."""

from kvhold.node.span.hosts import OtherHosts, OwnHost, RelayPlace
from kvhold.node.span.lookup import HostSpan, SpanHit
from kvhold.node.span.relay import Relay

__all__ = ["HostSpan", "OtherHosts", "OwnHost", "Relay", "RelayPlace", "SpanHit"]
