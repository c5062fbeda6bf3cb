import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhold.cli.options import socket_option
from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError
from kvhold.node.control_process import READY

if TYPE_CHECKING:
    from kvhold.control.server import ControlServer


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Address of the API; beyond loopback only with tokens and TLS. [default: 127.0.0.1:7780]",
)
@socket_option
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Settings file, TOML or YAML."
)
@click.option("--for-node", is_flag=True, hidden=True)
def command(
    listen: str | None, socket: str | None, config_file: Path | None, for_node: bool
) -> None:
    """Run the HTTP API of this host's node, until SIGTERM or SIGINT.

    More settings are in the section `control`, or in the environment as KVHOLD_CONTROL_*.
    """
    # from `node/control_process.py`
    arguments: dict[str, object] = json.loads(sys.stdin.readline()) if for_node else {}
    if listen is not None:
        arguments["control"] = {"listen": listen}
    if socket is not None:
        arguments["node"] = {"socket": socket}
    config = load_config(arguments, file=config_file)
    _yield_to_others(config.control.nice)
    asyncio.run(_serve(config, for_node=for_node))


def _yield_to_others(nice: int) -> None:
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


async def _serve(config: Config, *, for_node: bool) -> None:
    try:
        from kvhold.control.server import ControlServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kvhold control needs the module {error.name}, which is not installed here: "
            "pip install 'kvhold[control]'"
        ) from None

    def say(server: ControlServer) -> None:
        places = [str(server.path)]
        if server.host:
            host = f"[{server.host}]" if ":" in server.host else server.host
            scheme = "https" if config.control.tls_cert else "http"
            places.append(f"{scheme}://{host}:{server.port}")
        click.echo(f"{READY}{' and '.join(places)}")

    server = ControlServer(config)
    if for_node:
        _end_with_input(server)
    await server.serve(on_ready=say)


def _end_with_input(server: "ControlServer") -> None:
    def hear() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            server.stop()

    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), hear)
