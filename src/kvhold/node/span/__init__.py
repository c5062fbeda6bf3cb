"""An engine whose workers are on several hosts: one lookup asks the node of each host.

    relay = Relay(config.span, address, cache)           # in a worker, on another host
    others = OtherHosts([RelayPlace(...)], config.span)  # in the scheduler's process
    span = Span([OwnHost(cache, shards), *others.hosts])
    hit = span.lookup(prompt, deadline_s=1.0)            # as long as the shortest hit of all hosts

A node is reached only by its Unix socket, so a worker relays the lookups to it. A worker claims the
ticket of its own host.
"""

from kvhold.node.span.hosts import OtherHosts, OwnHost, RelayPlace
from kvhold.node.span.lookup import Span, SpanHit
from kvhold.node.span.relay import Relay

__all__ = ["OtherHosts", "OwnHost", "Relay", "RelayPlace", "Span", "SpanHit"]
