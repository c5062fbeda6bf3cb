"""The configured collector, and a tracer for it. Imports OpenTelemetry only if used."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvhold import __version__
from kvhold.core.errors import ConfigError
from kvhold.core.otel_config import OtelConfig
from kvhold.core.tracing import Tracer
from kvhold.net.addresses import is_loopback

Count = Callable[[str, int], None]
"""Called with `exported`, `failed` or `dropped`, and a number of spans. Any thread."""


@dataclass(frozen=True)
class Collector:
    """Where OTLP goes. resource: the attributes of this process."""

    url: str
    headers: dict[str, str] = field(repr=False)
    ca_file: str | None
    timeout_s: float
    resource: dict[str, str | int]

    def path(self, signal: str) -> str:
        """signal: traces or metrics"""
        return f"{self.url}/v1/{signal}"


def collector_of(config: OtelConfig, service: str) -> Collector:
    """Raises ConfigError."""
    url = urlsplit(config.endpoint)
    if url.scheme not in ("http", "https") or not _has_host(config.endpoint):
        raise ConfigError(
            f"otel.endpoint = {config.endpoint!r} is not the URL of an OTLP collector over HTTP; "
            "write it such as http://127.0.0.1:4318"
        )
    if url.username or url.query or url.fragment:
        raise ConfigError(
            "otel.endpoint takes a scheme, a host, a port and a path; write secrets to otel.headers"
        )
    headers = dict(map(_header, config.headers))
    is_clear = url.scheme == "http" and not is_loopback(url.hostname or "")
    if headers and is_clear and not config.insecure:
        raise ConfigError(
            f"otel.headers would cross the network to {url.hostname} in clear text; write https:// "
            "in otel.endpoint, or set otel.insecure if the network is trusted"
        )
    if config.ca_file and not Path(config.ca_file).is_file():
        raise ConfigError(f"otel.ca_file: there is no file {config.ca_file}")
    return Collector(
        config.endpoint.rstrip("/"),
        headers,
        config.ca_file or None,
        config.timeout_s,
        {
            "service.name": service,
            "service.version": __version__,
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        },
    )


def make_tracer(config: OtelConfig, service: str, count: Count) -> Tracer | None:
    """None: spans are off. Raises ConfigError."""
    if not config.endpoint or not config.traces:
        return None
    collector = collector_of(config, service)
    try:
        from kvhold.node.tracing import OtelTracer
    except ImportError as error:
        raise not_installed(error) from None
    return OtelTracer(config, collector, count)


def not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        f"otel.endpoint needs OpenTelemetry, which is not installed here ({error}): "
        "pip install 'kvhold[otel]', or leave otel.endpoint empty"
    )


def _has_host(endpoint: str) -> bool:
    try:
        url = urlsplit(endpoint)
        return bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if " " in value:  # the environment of a node has spaces between headers
        raise ConfigError(f"otel.headers: write %20 for each space in the value of {name}")
    value = unquote(value)
    if not equals or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError("otel.headers: write each header as NAME=VALUE")
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"otel.headers: the value of {name} has characters beyond ASCII's")
    return name, value
