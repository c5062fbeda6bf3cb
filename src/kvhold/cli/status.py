import json

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.cli.peers import summary
from kvhold.core.sizes import format_size
from kvhold.core.status import (
    CacheTierStatus,
    ControlProcessStatus,
    NodeStatus,
    check_status,
)


@click.command()
@socket_option
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """Show the node's chunks, memory and counters. Exits with 1 if there is no node."""
    with connect(socket, "kvhold status") as client:
        status = client.status()
    click.echo(json.dumps(status, indent=2) if as_json else _describe(check_status(status)))


def _describe(status: NodeStatus) -> str:
    held, pages = status["held"], "huge" if status["huge_pages"] else "normal"
    used, ready = format_size(status["used_bytes"]), format_size(status["arena_touched_bytes"])
    lines = [
        (
            f"node      pid {status['pid']}, kvhold {status['version']}, up "
            f"{status['uptime_s']:.0f} s, on {status['socket']}"
        ),
        (
            f"arena     {used} of {format_size(status['arena_bytes'])} used, {pages} pages, "
            f"{ready} ready"
        ),
        f"chunks    {status['chunks']}, {status['pinned_chunks']} of them pinned",
        (
            f"held      {held['tickets']} hits, {held['leases']} leases, "
            f"{held['reservations']} reservations"
        ),
        f"memory    {format_size(status['resident_bytes'])} outside the arena",
    ]
    scrub = status["scrub"]
    seen = f"{scrub['passes']} passes, {format_size(scrub['pass_bytes'])} in this one"
    lines.append(f"scrubber  {seen}" if scrub["interval_s"] else "scrubber  off")
    tiers = status.get("tiers", [])
    lines += [f"tier      {tier['name']}: {_describe_tier(tier)}" for tier in tiers]
    if tiers:
        behind = status["write_behind"]
        lines.append(
            f"below     {behind['chunks']} chunks wait to be written "
            f"({format_size(behind['bytes'])}), {status['arriving_chunks']} arrive"
        )
    lines += summary(status)
    if (control := status.get("control")) is not None:
        lines.append(f"API       {describe_control(control)}")
    lines += [
        f"client    {c['name']} (pid {c['pid']}), heard {c['silent_s']:.1f} s ago"
        for c in status["clients"]
    ]
    lines += [
        f"          {name} {value:.0f}"
        for name, value in (status["counters"] | status.get("tier_counters", {})).items()
    ]
    return "\n".join(lines)


def describe_control(control: ControlProcessStatus) -> str:
    why = f"{control['restarts']} restarts, {control['last_fault']}"
    if control["address"]:
        return f"on {control['address']}{f'; {why}' if control['restarts'] else ''}"
    return f"does not run: {why}" if control["last_fault"] else "is starting"


def _describe_tier(tier: CacheTierStatus) -> str:
    if not tier["available"]:
        return f"not used: {tier['last_fault']}"
    how = ([] if tier["codec"] == "raw" else [f"codec {tier['codec']}"]) + (
        ["encrypted"] if tier["encrypted"] else []
    )
    return ", ".join(["in use", *how])
