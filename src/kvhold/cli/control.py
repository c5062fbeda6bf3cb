import asyncio
import os
from pathlib import Path

import click

from kvhold.cli.options import socket_option
from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError


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
def command(listen: str | None, socket: str | None, config_file: Path | None) -> None:
    """Run the HTTP API of this host's node: health, status, metrics and control, until SIGTERM or
    SIGINT.

    More settings are in the section `control` of the settings file, or in the environment as
    KVHOLD_CONTROL_*.
    """
    arguments: dict[str, object] = {}
    if listen is not None:
        arguments["control"] = {"listen": listen}
    if socket is not None:
        arguments["node"] = {"socket": socket}
    config = load_config(arguments, file=config_file)
    _yield_to_others(config.control.nice)
    asyncio.run(_serve(config))


def _yield_to_others(nice: int) -> None:
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


async def _serve(config: Config) -> None:
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
        click.echo(f"kvhold control ready on {' and '.join(places)}")

    await ControlServer(config).serve(on_ready=say)
