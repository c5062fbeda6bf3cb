import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvhold.cli.detached import default_log, go_on_detached
from kvhold.cli.tier_urls import check_no_secrets
from kvhold.core.config import load_config
from kvhold.core.sizes import format_size
from kvhold.net.central import CENTRAL_VERSION
from kvhold.net.messages import PROTOCOL_VERSION
from kvhold.node.central import Central
from kvhold.node.paths import socket_path
from kvhold.node.pauses import avoid_pauses
from kvhold.node.server import Node


@click.command()
@click.option("--socket", help="Path of the Unix socket. [default: one for this user]")
@click.option(
    "--ram-bytes",
    help="Size of the cache, such as 8GiB. [default: a quarter of the free memory, at most 4GiB]",
)
@click.option(
    "--policy", help="Which chunk is evicted first: lru, lfu, fifo, mru, s3fifo or learned."
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    help="Tier below RAM, such as disk:///var/cache/kvhold. May be repeated, the fastest first.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Serve other hosts as their central cache instead; beyond loopback only with "
    "authentication.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="With --listen: file with the token that clients must send.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    help="With --listen: PEM file with the certificate and key of the server, for TLS.",
)
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path),
    help="With --listen: PEM file of the CA that signs clients' certificates.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="With --listen beyond loopback: without TLS; others on the network can read token and KV.",
)
@click.option(
    "--idle-exit-s",
    type=float,
    help="End after this many seconds without clients. [default: never]",
)
@click.option(
    "--detach", is_flag=True, help="Continue in the background once it is ready, without a parent."
)
@click.option(
    "--log-file",
    type=click.Path(path_type=Path),
    help="With --detach: log to this file, which is rotated. [default: next to the socket]",
)
@click.option(
    "--restart", is_flag=True, help="With --detach: start the node again if it is killed."
)
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
        here = socket_path(config.node.socket)  # a detached node changes its folder
        config = replace(config, node=replace(config.node, socket=str(here)))
    say: Callable[[str], None] = click.echo
    if detach:
        is_central = bool(config.listen.address)
        file = log_file.absolute() if log_file is not None else default_log(config)
        config, say = go_on_detached(config, file, restart=restart and not is_central)
    avoid_pauses()
    if config.listen.address:
        asyncio.run(Central(config).serve(on_ready=lambda central: say(_central_line(central))))
    else:
        asyncio.run(
            Node(config, idle_exit_s=idle_exit_s).serve(on_ready=lambda node: say(_node_line(node)))
        )


def _central_line(central: Central) -> str:
    size = format_size(central.central_store.arena.nbytes)
    return (
        f"kvhold central cache ready on {central.host}:{central.port}: {size}, protocol "
        f"{CENTRAL_VERSION}"
    )


def _node_line(node: Node) -> str:
    pages = "huge" if node.arena.huge else "normal"
    return (
        f"kvhold node ready on {node.path}: {format_size(node.arena.nbytes)} in {pages} "
        f"pages, protocol {PROTOCOL_VERSION}"
        + (f", peers on {node.peers_address}" if node.peers_address else "")
    )
