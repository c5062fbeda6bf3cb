import asyncio
from pathlib import Path

import click

from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold.core.proxy_config import ProxyConfig


@click.command()
@click.option(
    "--prefill",
    metavar="URL",
    multiple=True,
    help="Engine that only computes prompts, such as http://127.0.0.1:8100. May be repeated.",
)
@click.option(
    "--decode",
    metavar="URL",
    multiple=True,
    help="Engine that answers. May be repeated; at least one is needed.",
)
@click.option(
    "--protocol",
    help="How KV is handed over: shared (by one kvhold node, or shared tiers or peers), nixl or "
    "p2p. [default: shared]",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Address of the proxy; beyond loopback only with a key. [default: 127.0.0.1:8090]",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File with the key that clients must send. [default: none]",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    help="PEM file with the proxy's certificate and key, for TLS.",
)
@click.option(
    "--min-prefill-tokens",
    type=int,
    help="Send shorter prompts to a decode engine alone. [default: 256]",
)
@click.option("--chat", is_flag=True, help="Serve a chat as the page /chat.")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Settings file, TOML or YAML."
)
def command(
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    protocol: str | None,
    listen: str | None,
    api_key_file: Path | None,
    tls_cert: Path | None,
    min_prefill_tokens: int | None,
    chat: bool,
    config_file: Path | None,
) -> None:
    """Run an OpenAI-compatible proxy before prefill and decode engines, until SIGTERM or SIGINT.

    More settings are in the section `proxy`, or in the environment as KVHOLD_PROXY_*.
    """
    given = {
        "prefill": prefill or None,
        "decode": decode or None,
        "protocol": protocol,
        "listen": listen,
        "api_key_file": None if api_key_file is None else str(api_key_file),
        "tls_cert": None if tls_cert is None else str(tls_cert),
        "min_prefill_tokens": min_prefill_tokens,
        "chat": chat or None,
    }
    arguments = {name: value for name, value in given.items() if value is not None}
    config = load_config({"proxy": arguments} if arguments else {}, file=config_file).proxy
    asyncio.run(_serve(config))


async def _serve(config: ProxyConfig) -> None:
    try:
        from kvhold.proxy.server import ProxyServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kvhold proxy needs the module {error.name}, which is not installed here: "
            "pip install 'kvhold[proxy]'"
        ) from None

    def say(server: ProxyServer) -> None:
        scheme = "https" if config.tls_cert else "http"
        host = f"[{server.host}]" if ":" in server.host else server.host
        click.echo(
            f"kvhold proxy ready on {scheme}://{host}:{server.port}: {len(config.prefill)} prefill "
            f"and {len(config.decode)} decode engines, protocol {config.protocol}"
        )

    await ProxyServer(config).serve(on_ready=say)
