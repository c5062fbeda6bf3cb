"""`kvhold compress` and `decompress`."""

import json
import sys
from dataclasses import dataclass

import click
from msgspec.structs import asdict

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.core.api import ReencodeProgress
from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.core.sizes import format_size

_RESULTS = {
    "same": "have this codec already",
    "kept_lossy": "have another lossy codec, and stay as they are",
    "missing": "were deleted or had expired",
    "bad": "failed a check and were removed",
    "unknown": "have a layout that no engine registered, or a codec that is not installed here",
    "failed": "stay as they are, because the tier failed or there is no key for them",
}


@dataclass(frozen=True)
class CompressOptions:
    tier: str
    namespace: str | None
    socket: str | None
    as_json: bool


@click.command()
@click.option("--tier", required=True, help="Name of the tier, as in `kvhold status`.")
@click.option(
    "--codec",
    required=True,
    help="New codec of its chunks, such as lossless or cachegen.",
)
@click.option(
    "--namespace",
    help="Only chunks of this namespace: its digest in hex. [default: all that the node knows]",
)
@socket_option
@json_option
def command(
    tier: str, codec: str, namespace: str | None, socket: str | None, as_json: bool
) -> None:
    """Re-encode the chunks of a tier of this host's node with another codec, online.

    Returns when it is done.

    The budget of each namespace still applies: lossless replaces a lossy codec where the namespace
    allows no loss, as by default. A lossy codec never re-encodes a chunk of another lossy codec.
    """
    reencode(codec, CompressOptions(tier, namespace, socket, as_json))


def reencode(codec: str, options: CompressOptions) -> None:
    """Exits with 1 if the re-encoding ended early."""
    namespace = _digest(options.namespace)
    with (
        connect(options.socket, "kvhold compress") as client,
        client.reencode(options.tier, codec, namespace=namespace) as reencoding,
    ):
        progress = reencoding.wait()
    click.echo(
        json.dumps(asdict(progress), indent=2) if options.as_json else _describe(progress, codec)
    )
    if progress.stopped:
        click.echo(f"kvhold: the re-encoding ended early: {progress.stopped}", err=True)
        sys.exit(1)


def _digest(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != NAMESPACE_BYTES:
        raise ConfigError(
            f"--namespace {text!r}: write its digest, {2 * NAMESPACE_BYTES} hexadecimal digits"
        )
    return digest


def _describe(progress: ReencodeProgress, codec: str) -> str:
    if not progress.seen:
        return (
            "nothing to do: the tier holds no chunk of a namespace that the node knows; "
            "engines register theirs when they connect"
        )
    before, after = format_size(progress.bytes_before), format_size(progress.bytes_after)
    lines = [
        (
            f"{progress.replaced} of {progress.seen} chunks were re-encoded with {codec}: "
            f"{before} before, {after} now"
        )
    ]
    if progress.over_budget:
        lines.append(
            f"  {progress.over_budget} of all use lossless or a more exact codec, because their "
            "namespace allows no loss, or less loss (settings rules.max_error, rules.max_bits)"
        )
    lines += [
        f"  {count} {what}" for name, what in _RESULTS.items() if (count := getattr(progress, name))
    ]
    return "\n".join(lines)
