"""An engine whose workers are on several hosts: one lookup asks each host's node.

    relay = Relay(config.span, address, cache)           # in a worker, on another host
    others = OtherHosts([RelayPlace(...)], config.span)  # in the scheduler's process
    span = Span([OwnHost(cache, shards), *others.hosts])
    hit = span.lookup(prompt, deadline_s=1.0)            # the shortest hit of all hosts

A node has only a Unix socket, so a worker relays the lookups. Workers claim their own host's
ticket.
"""

from kvhold.node.span.hosts import OtherHosts, OwnHost, RelayPlace
from kvhold.node.span.lookup import Span, SpanHit
from kvhold.node.span.relay import Relay

__all__ = ["OtherHosts", "OwnHost", "Relay", "RelayPlace", "Span", "SpanHit"]
