"""TLS contexts. A missing file or a key that does not match is a ConfigError."""

import ssl

from kvhold.core.errors import ConfigError


def client_context(ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext:
    """ca_file:   empty: the system's authorities
    cert_file: the client's; empty: none
    key_file:  empty: in `cert_file`
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ConfigError(f"ca_file: cannot use {ca_file}: {error}") from None
    if cert_file:
        _load(context, cert_file, key_file)
    return context


def server_context(cert_file: str, key_file: str, client_ca_file: str) -> ssl.SSLContext:
    """client_ca_file: of required client certificates; empty: none are required"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, cert_file, key_file)
    if client_ca_file:
        try:
            context.load_verify_locations(cafile=client_ca_file)
        except OSError as error:
            raise ConfigError(f"client_ca_file: cannot use {client_ca_file}: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    try:
        context.load_cert_chain(cert_file, key_file or None)
    except OSError as error:
        raise ConfigError(
            f"cert_file: cannot use {cert_file}{f' with {key_file}' if key_file else ''}: {error}"
        ) from None
