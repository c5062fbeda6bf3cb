"""One file per command, imported when it is called."""

import logging
import os
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from kvhold import __version__
from kvhold.core.errors import ConfigError, KVHoldError

_COMMANDS = {
    "serve": ("kvhold.cli.serve", "Run this host's node in the foreground."),
    "status": ("kvhold.cli.status", "Show what the node holds and counts."),
    "explain": ("kvhold.cli.explain", "Say why a request was loaded, or computed."),
    "names": ("kvhold.cli.names", "Say what KV is named by, and why two engines share none."),
    "compress": (
        "kvhold.cli.compress",
        "Write what a tier holds anew by a codec, while all serves.",
    ),
    "decompress": ("kvhold.cli.decompress", "Write what a tier holds anew without a codec."),
    "clients": ("kvhold.cli.clients", "List the node's clients and what each holds."),
    "kick": ("kvhold.cli.kick", "End a client of the node."),
    "stop": ("kvhold.cli.stop", "End this host's node."),
    "tiers": ("kvhold.cli.tiers", "Which tiers there are, and what can be set."),
    "doctor": ("kvhold.cli.doctor", "Try each tier, and say what is wrong."),
    "demo": ("kvhold.lab.demo.command", "Show on a real engine what a hit is worth."),
    "verify": (
        "kvhold.lab.verify.command",
        "Prove on a model that kvhold changes no answer and no bit.",
    ),
    "size": ("kvhold.cli.size", "How large a model's KV is, and how much of it fits where."),
    "simulate": (
        "kvhold.lab.simulate.command",
        "What caches would have found of a trace, by policy and size.",
    ),
    "bench": ("kvhold.lab.bench.command", "Measure, against limits taken in the same run."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], _COMMANDS, n=1)
            ctx.fail(
                f"There is no command {args[0]!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in _COMMANDS.items()])


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
    """Our own errors print one line and exit with status 1."""
    try:
        cli.main(prog_name="kvhold")
    except KVHoldError as error:
        click.echo(f"kvhold: {error}", err=True)
        sys.exit(1)
