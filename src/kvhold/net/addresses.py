import ipaddress

from kvhold.core.errors import ConfigError


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def network_of(host: str) -> str:
    """For IPv6 it is a /64, because one host may have all of its addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    if address.version == 4 or mapped:
        return str(mapped or address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def split_address(text: str, where: str) -> tuple[str, int]:
    """(host, port). where: source of the text, for errors. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{where}: {text!r} is not HOST:PORT (an IPv6 address in brackets)")
    return host, int(port)
