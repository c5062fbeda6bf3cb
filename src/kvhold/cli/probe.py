"""No secret is sent, unless the central cache has no TLS."""

import asyncio
import http.client
import json
import ssl
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click

from kvhold.cli.options import socket_option
from kvhold.cli.own_api import UnixConnection
from kvhold.core.config import Config, ListenConfig, load_config
from kvhold.core.errors import NodeError, NodeRefused, TierDenied, TierError
from kvhold.core.secrets import read_secret
from kvhold.core.status import check_status
from kvhold.net.addresses import split_address
from kvhold.net.stream import Address, open_stream
from kvhold.node import NodeClient
from kvhold.node.paths import control_path, socket_path
from kvhold.tiers.central import CentralConfig, CentralTier

_MOST_BYTES = 64 << 10
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@click.command()
@click.option("--live", is_flag=True, help="Does the process answer at all?")
@click.option("--ready", is_flag=True, help="Does it serve? [the default]")
@click.option("--control", is_flag=True, help="Ask the API of `kvhold control` instead.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0.01),
    default=5.0,
    show_default=True,
    help="No answer within this time is a failure.",
)
@socket_option
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Settings file, TOML or YAML."
)
def command(
    live: bool,
    ready: bool,
    control: bool,
    timeout_s: float,
    socket: str | None,
    config_file: Path | None,
) -> None:
    """Ask whether the node works. Exits with 0 if it does, else with 1 and the reason.

    With `listen.address` in the settings, the central cache is asked instead.

    A node that refuses more clients is live, but not ready. The API is ready if its node answers.
    Both are ready without tiers that are down, which are named.
    """
    if live and ready:
        raise click.UsageError("either --live or --ready, not both")
    config = load_config({"node": {"socket": socket}} if socket else {}, file=config_file)
    if control:
        says = _ask_control(config, live=live, timeout_s=timeout_s)
    elif config.listen.address:
        says = asyncio.run(_ask_central(config.listen, live=live, timeout_s=timeout_s))
    else:
        says = _ask_node(config, live=live, timeout_s=timeout_s)
    click.echo(says)


def _ask_node(config: Config, *, live: bool, timeout_s: float) -> str:
    path = socket_path(config.node.socket)
    limits = replace(config.client, connect_timeout_s=timeout_s, call_timeout_s=timeout_s)
    try:
        with NodeClient(path, limits, name="kvhold probe") as client:
            if live:
                client.ping()
                return f"the node on {path} is live"
            status = check_status(client.status())
    except NodeRefused as error:
        if live:
            return f"the node on {path} is live, but refuses clients: {error}"
        raise
    says = [f"the node on {path} is ready"]
    says += [
        f"its tier {tier['name']} is not used: {tier['last_fault']}"
        for tier in status.get("tiers", [])
        if not tier["available"]
    ]
    return "\n".join(says)


async def _ask_central(config: ListenConfig, *, live: bool, timeout_s: float) -> str:
    host, port = split_address(config.address, "listen.address")
    host = _ANY_ADDRESS.get(host, host)
    what = f"the central cache on {host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            if config.tls_cert:
                await _shake_hands(Address(host, port))
            else:
                await _log_in(host, port, config)
    except TierDenied as error:
        if live:
            return f"{what} is live, but refuses clients: {error}"
        raise NodeError(f"{what} is not ready: {error}") from None
    except TimeoutError:
        raise NodeError(f"{what} did not answer within {timeout_s:g} s") from None
    except (OSError, EOFError, TierError) as error:
        raise NodeError(f"{what} does not answer: {error}") from None
    return f"{what} is {'live' if live else 'ready'}"


async def _shake_hands(address: Address) -> None:
    """Unverified: nothing is sent, and the certificate need not name this address."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    stream = await open_stream(address, context)
    stream.close()


async def _log_in(host: str, port: int, config: ListenConfig) -> None:
    token = config.token
    if config.token_file:
        token = read_secret(config.token_file, where="listen.token_file")
    tier = CentralTier(CentralConfig(host=host, port=port, token=token, insecure=config.insecure))
    try:
        await tier.check()
    finally:
        await tier.close()


def _ask_control(config: Config, *, live: bool, timeout_s: float) -> str:
    path = control_path(config.control.socket, socket_path(config.node.socket))
    asked = "live" if live else "ready"
    connection = UnixConnection(path, timeout_s)
    try:
        connection.request("GET", f"/health/{asked}")
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
        raise NodeError(f"no API answers on {path} within {timeout_s:g} s: {why}") from None
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        raise NodeError(f"the API on {path} is not {asked}: {_detail(body, answer.status)}")
    return f"the API on {path} is {asked}"


def _detail(body: bytes, status: int) -> str:
    try:
        problem: Any = json.loads(body)
    except ValueError:
        problem = None
    detail = problem.get("detail") if isinstance(problem, dict) else None
    return f"status {status}" if detail is None else str(detail)[:500]
