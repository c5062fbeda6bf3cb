"""TLS contexts: `client_context(ca_file, cert_file, key_file)`, `server_context(cert_file, key_file, client_ca_file)`.

What a user may have got wrong (a file that is not there, a key that is not the certificate's) is a ConfigError that names the file.
"""

import ssl

from kvhold.core.errors import ConfigError


def client_context(ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext:
    """Checks the server's certificate and name; shows our own where there is one. Empty names mean the system's, and none."""
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ConfigError(f"ca_file: cannot use {ca_file}: {error}") from None
    if cert_file:
        _load(context, cert_file, key_file)
    return context


def server_context(cert_file: str, key_file: str, client_ca_file: str) -> ssl.SSLContext:
    """Shows our certificate; with a client_ca_file, demands one of each client that these authorities have signed."""
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
        raise ConfigError(f"cert_file: cannot use {cert_file}{f' with {key_file}' if key_file else ''}: {error}") from None
