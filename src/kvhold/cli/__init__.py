"""One module per command, imported when called."""

import logging
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

import click

from kvhold import __version__
from kvhold.core.errors import ConfigError, KVHoldError

_COMMANDS = {
    "serve": ("kvhold.cli.serve", "Run this host's node in the foreground."),
    "proxy": ("kvhold.cli.proxy", "Run a proxy before prefill and decode engines."),
    "control": ("kvhold.cli.control", "Run the HTTP API of this host's node."),
    "status": ("kvhold.cli.status", "Show the node's chunks, memory and counters."),
    "top": ("kvhold.cli.top", "Show live what the node does."),
    "explain": ("kvhold.cli.explain", "Explain why a request's KV was loaded or computed."),
    "names": ("kvhold.cli.names", "List namespaces, and show why two engines share no KV."),
    "compress": ("kvhold.cli.compress", "Re-encode a tier's chunks with a codec, online."),
    "decompress": ("kvhold.cli.decompress", "Re-encode a tier's chunks without loss, online."),
    "clients": ("kvhold.cli.clients", "List the node's clients and their holdings."),
    "peers": ("kvhold.cli.peers", "List the node's peers: followed ones and served ones."),
    "kick": ("kvhold.cli.kick", "End a client of the node."),
    "lookup": ("kvhold.cli.lookup", "Show how much of a prompt is cached, and where."),
    "prefetch": ("kvhold.cli.prefetch", "Load a prompt's KV from lower tiers into memory."),
    "pin": ("kvhold.cli.pin", "Keep a prompt's KV in memory for a time, or list the pins."),
    "unpin": ("kvhold.cli.unpin", "End a pin."),
    "move": ("kvhold.cli.move", "Move or copy a prompt's KV between memory, tiers and peers."),
    "clear": (
        "kvhold.cli.clear",
        "Forget the KV of a prompt, namespace, tag or tier, or all.",
    ),
    "settings": ("kvhold.cli.settings", "Show or change settings of the running node."),
    "probe": ("kvhold.cli.probe", "Ask whether the node works, by an exit code."),
    "stop": ("kvhold.cli.stop", "End this host's node."),
    "tiers": ("kvhold.cli.tiers", "List the kinds of tiers and their settings."),
    "doctor": ("kvhold.cli.doctor", "Test the node and each tier, and report faults."),
    "migrate": ("kvhold.cli.migrate", "Translate LMCache's settings to kvhold's."),
    "size": ("kvhold.cli.size", "Show the size of a model's KV, and how many tokens fit."),
}
_LAB_COMMANDS = {
    "demo": "Show on a real engine how much time a hit saves.",
    "verify": "Prove on a model that kvhold changes no answer and no bit.",
    "simulate": "Replay a trace, and show the hits of caches by policy and size.",
    "bench": "Measure, and compare with limits measured in the same run.",
}
"""Commands of the distribution kvhold-lab, which registers them as entry points."""

_LAB_GROUP = "kvhold.commands"
_NO_LAB = (
    "kvhold {name} is in the package kvhold-lab, which is not installed here: "
    "pip install 'kvhold[lab]'"
)


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *_LAB_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LAB_COMMANDS:
            return _lab_command(cmd_name)
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            near = get_close_matches(args[0], known, n=1)
            ctx.fail(
                f"There is no command {args[0]!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, text) in _COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        with formatter.section("Commands of kvhold-lab"):
            formatter.write_dl(list(_LAB_COMMANDS.items()))


def _lab_command(name: str) -> click.Command:
    for point in entry_points(group=_LAB_GROUP, name=name):
        try:
            command: click.Command = point.load()
        except ModuleNotFoundError as error:
            raise LabMissing(
                f"kvhold {name} needs the module {error.name}, which is not installed here: "
                "pip install 'kvhold[lab]'"
            ) from error
        return command
    raise LabMissing(_NO_LAB.format(name=name))


class LabMissing(KVHoldError):
    """kvhold-lab is not installed, or only in part."""


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="kvhold %(version)s")
def cli() -> None:
    """kvhold holds the KV caches of LLM engines, so that no text is prefilled twice."""
    level = os.environ.get("KVHOLD_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"environment: KVHOLD_LOG_LEVEL = {level!r}: must be one of DEBUG, INFO, "
            "WARNING, ERROR, CRITICAL"
        )
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def main() -> None:
    """A `KVHoldError` prints one line and exits with status 1."""
    try:
        cli.main(prog_name="kvhold")
    except KVHoldError as error:
        click.echo(f"kvhold: {error}", err=True)
        sys.exit(1)
