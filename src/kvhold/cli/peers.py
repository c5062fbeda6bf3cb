import json
from collections.abc import Iterator

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.core.sizes import format_size
from kvhold.core.status import (
    CacheTierStatus,
    FollowedPeersStatus,
    FollowedPeerStatus,
    NodeStatus,
    ServedPeersStatus,
    ServedPeerStatus,
    check_status,
)

_NOT_OTHERS = ("itself", "elsewhere")


@click.command()
@socket_option
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """List the peers that this host's node follows, and the nodes that it serves. Exits with 1 if
    there is no node.
    """
    with connect(socket, "kvhold peers") as client:
        status = check_status(client.status())
    if as_json:
        tier = _tier_of_peers(status)
        parts = {
            "followed_peers": None if tier is None else tier["followed_peers"],
            "served_peers": status.get("served_peers"),
        }
        click.echo(json.dumps(parts, indent=2))
    else:
        click.echo("\n".join(_describe(status)))


def summary(status: NodeStatus) -> Iterator[str]:
    if (tier := _tier_of_peers(status)) is not None:
        followed = tier["followed_peers"]
        states = [peer["state"] for peer in followed["peers"] if peer["state"] not in _NOT_OTHERS]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        yield f"peers     {counts or 'none'}; {_index(tier)}"
        yield from _channels(followed)
        yield from _list_fault(followed)
    if (served := status.get("served_peers")) is not None:
        reading = sum(peer["connections"] > 0 for peer in served["peers"])
        yield (
            f"serving   {reading} peers on {served['address']}, {served['chunks']} chunks, "
            f"{_offered(served)}"
        )


def _tier_of_peers(status: NodeStatus) -> CacheTierStatus | None:
    return next((tier for tier in status.get("tiers", []) if "followed_peers" in tier), None)


def _describe(status: NodeStatus) -> Iterator[str]:
    tier, served = _tier_of_peers(status), status.get("served_peers")
    if tier is not None:
        yield from _describe_followed(tier)
    else:
        yield "this node follows no peers (a tier peers://)"
    yield ""
    if served is not None:
        yield from _describe_served(served)
    else:
        yield "this node serves no peers (setting peers.listen)"


def _describe_followed(tier: CacheTierStatus) -> Iterator[str]:
    followed = tier["followed_peers"]
    yield (
        f"{'PEER':24} {'NAME':16} {'STATE':20} {'FOR':>7} {'CHUNKS':>9} {'EVENTS/S':>9} "
        f"{'LOADED':>10} {'LOADS/S':>8} {'LAST':>9} {'MEDIAN':>9}  CHANNEL"
    )
    for peer in followed["peers"]:
        state = peer["state"] + (f": {peer['cause']}" if peer["cause"] else "")
        yield (
            f"{peer['address']:24} {peer['name']:16.16} {state:20} {_ago(peer['state_s']):>7} "
            f"{peer['chunks']:9} {peer['events_per_s']:9.1f} "
            f"{format_size(peer['loaded_bytes']):>10} {peer['loads_per_s']:8.2f} "
            f"{_ms(peer['last_load_s']):>9} {_ms(peer['median_load_s']):>9}  {peer['channel']}"
        )
    yield _index(tier)
    yield from _channels(followed)
    if followed["directory"]:
        age_s = followed["list_age_s"]
        read = "not read yet" if age_s is None else f"read {_ago(age_s)} ago"
        own = f"; registered as {followed['registered']}" if followed["registered"] else ""
        yield f"list      {followed['directory']}, {read}{own}"
    yield from _list_fault(followed)
    if followed["bus"]:
        num_by_bus = sum(peer["by_bus"] for peer in followed["peers"])
        ignored = f", {followed['bus_ignored']} records ignored" if followed["bus_ignored"] else ""
        yield f"bus       {followed['bus']}: {num_by_bus} peers followed by it{ignored}"
        if followed["bus_fault"]:
            yield f"fault     {followed['bus_fault']}"
    yield from (_fault(peer) for peer in followed["peers"] if peer["last_fault"])


def _describe_served(served: ServedPeersStatus) -> Iterator[str]:
    yield (
        f"serving on {served['address']}: {served['chunks']} chunks, "
        f"{format_size(served['in_flight_bytes'])} in flight, {_offered(served)}"
    )
    if served["peers"]:
        yield (
            f"{'SERVED':24} {'NAME':16} {'STATE':20} {'FOR':>7} {'CHUNKS':>9} {'ABSENT':>9} "
            f"{'SENT':>10} {'BYTES/S':>10}"
        )
    for peer in served["peers"]:
        yield (
            f"{peer['address']:24} {peer['name']:16.16} {_served_state(peer):20} "
            f"{_ago(peer['state_s']):>7} {peer['chunks']:9} {peer['absent_chunks']:9} "
            f"{format_size(peer['bytes']):>10} {format_size(int(peer['bytes_per_s'])):>10}"
        )
    for refused in served["refused"]:
        yield (
            f"refused   {refused['address']}, {refused['times']} times, {_ago(refused['ago_s'])} "
            f"ago: {refused['reason']}"
        )


def _served_state(peer: ServedPeerStatus) -> str:
    if not peer["connections"]:
        return "gone"
    return "follows" if peer["follows"] else "reads"


def _index(tier: CacheTierStatus) -> str:
    index = format_size(tier["index_bytes"] or 0)
    return f"{tier['followed_peers']['chunks']} chunks in an index of {index}"


def _channels(followed: FollowedPeersStatus) -> Iterator[str]:
    peers = [peer for peer in followed["peers"] if peer["state"] == "following"]
    if by_nixl := [peer for peer in peers if peer["channel"] == "nixl"]:
        nbytes = format_size(sum(peer["nixl_bytes"] for peer in by_nixl))
        yield f"channel   nixl for {len(by_nixl)} peers, {nbytes} loaded by it"
    over_tcp = [peer for peer in peers if peer["channel"] != "nixl"]
    for reason in dict.fromkeys(peer["channel_reason"] for peer in over_tcp):
        names = [peer["address"] for peer in over_tcp if peer["channel_reason"] == reason]
        yield f"channel   tcp for {', '.join(names)}: {reason}"


def _offered(served: ServedPeersStatus) -> str:
    if served["channel"] == "nixl":
        return "by TCP and NIXL"
    return f"by TCP ({served['channel_reason']})"


def _list_fault(followed: FollowedPeersStatus) -> Iterator[str]:
    if followed["list_fault"]:
        yield f"fault     {followed['list_fault']}"


def _fault(peer: FollowedPeerStatus) -> str:
    ago_s = peer["last_fault_ago_s"] or 0.0
    return f"fault     {_ago(ago_s)} ago: {peer['last_fault']}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _ago(seconds: float) -> str:
    for unit, unit_s, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
