"""`kvhold serve`."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvhold.cli.tier_urls import check_no_secrets
from kvhold.core.config import Config, load_config
from kvhold.core.errors import NodeError
from kvhold.core.sizes import format_size
from kvhold.memory.arena import default_arena_bytes
from kvhold.net.central import CENTRAL_VERSION
from kvhold.net.messages import PROTOCOL_VERSION
from kvhold.node.central import Central
from kvhold.node.host import belong_to_host, raise_priority
from kvhold.node.logs import write_log
from kvhold.node.paths import socket_path
from kvhold.node.pauses import avoid_pauses
from kvhold.node.server import Node
from kvhold.node.watcher import restart_when_killed, wait_for_room

log = logging.getLogger(__name__)


@click.command()
@click.option("--socket", help="Path of the Unix socket. [default: one for this user]")
@click.option(
    "--ram-bytes",
    help="Size of the cache, such as 8GiB. [default: a quarter of what is free, at most 4GiB]",
)
@click.option("--policy", help="Which chunk is evicted first: lru, lfu, fifo, mru or s3fifo.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    help="Where chunks live below RAM, such as disk:///var/cache/kvhold; the fastest first.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Be the central cache of other hosts instead; beyond loopback only with authentication.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="With --listen: a file with the token that clients must know.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    help="With --listen: PEM file of the certificate (and key) to talk TLS with.",
)
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path),
    help="With --listen: PEM file of who must have signed clients' certificates.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="With --listen beyond loopback: without TLS, so that others may read token and KV.",
)
@click.option(
    "--idle-exit-s", type=float, help="End after so many seconds without clients. [default: never]"
)
@click.option(
    "--detach", is_flag=True, help="Go on in the background once it is ready, and belong to nobody."
)
@click.option(
    "--log-file",
    type=click.Path(path_type=Path),
    help="With --detach: log to this file, which is rotated, not to standard error.",
)
@click.option("--restart", is_flag=True, help="With --detach: start it again when it was killed.")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Settings file, TOML or YAML."
)
def command(
    socket: str | None,
    ram_bytes: str | None,
    policy: str | None,
    tiers: tuple[str, ...],
    listen: str | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_client_ca: Path | None,
    insecure: bool,
    idle_exit_s: float | None,
    detach: bool,
    log_file: Path | None,
    restart: bool,
    config_file: Path | None,
) -> None:
    """Run this host's node, or with --listen a central cache for other hosts, until SIGTERM or
    SIGINT."""
    arguments: dict[str, Any] = {}
    if ram_bytes is not None:
        arguments["ram_bytes"] = ram_bytes
    if policy is not None:
        arguments["policy"] = policy
    if tiers:
        check_no_secrets(tiers)
        arguments["tiers"] = tiers
    if socket is not None:
        arguments["node"] = {"socket": socket}
    given = {
        "address": listen,
        "token_file": token_file,
        "tls_cert": tls_cert,
        "tls_client_ca": tls_client_ca,
    }
    if listening := {name: str(value) for name, value in given.items() if value is not None}:
        arguments["listen"] = listening | ({"insecure": True} if insecure else {})
    config = load_config(arguments, file=config_file)
    if not config.listen.address:
        here = socket_path(config.node.socket)  # before a detached node changes its folder
        config = replace(config, node=replace(config.node, socket=str(here)))
    log_file = log_file.absolute() if log_file is not None else None
    release = None
    if detach:
        config, release = _detach(config, log_file, restart=restart and not config.listen.address)
    avoid_pauses()
    if config.listen.address:
        asyncio.run(
            Central(config).serve(on_ready=lambda central: _announce_central(central, release))
        )
    else:
        asyncio.run(
            Node(config, idle_exit_s=idle_exit_s).serve(
                on_ready=lambda node: _announce(node, release)
            )
        )


def _detach(
    config: Config, log_file: Path | None, *, restart: bool
) -> tuple[Config, Callable[[], None]]:
    """Continue in a child process that belongs to the host (`node/host.py`).

    It has no parent: some engines kill all their descendants. Returns settings, and a function that
    ends the caller's process, to call when the node listens.
    """
    ready, say = os.pipe()
    child = os.fork()
    if child:
        os.close(say)
        if os.read(ready, 1):
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(max(1, os.waitstatus_to_exitcode(status)))
    os.setsid()
    belong_to_host(keep=(say,))
    raise_priority(config.node.nice)
    killed = False
    if restart:
        # a restarted node is no smaller
        config = replace(config, ram_bytes=config.ram_bytes or default_arena_bytes())
        try:
            killed = restart_when_killed(Path(config.node.socket))
        except OSError as error:
            raise NodeError(f"node.socket: {error}") from None
    if log_file is not None:
        try:
            write_log(log_file, max_bytes=config.node.log_bytes, files=config.node.log_files)
        except OSError as error:
            raise NodeError(f"--log-file {log_file}: {error}") from None

    if killed:
        log.warning("the node on %s was killed: starting it again", config.node.socket)
        wait_for_room(config, config.ram_bytes)

    def release() -> None:
        with suppress(BrokenPipeError):  # a restart: the first caller has ended
            os.write(say, b"1")
        os.close(say)

    return config, release


def _announce_central(central: Central, release: Callable[[], None] | None) -> None:
    size = format_size(central.central_store.arena.nbytes)
    click.echo(
        f"kvhold central cache ready on {central.host}:{central.port}: {size}, protocol "
        f"{CENTRAL_VERSION}"
    )
    if release is not None:
        release()


def _announce(node: Node, release: Callable[[], None] | None) -> None:
    pages = "huge" if node.arena.huge else "normal"
    click.echo(
        f"kvhold node ready on {node.path}: {format_size(node.arena.nbytes)} in {pages} "
        f"pages, protocol {PROTOCOL_VERSION}"
    )
    if release is not None:
        release()
