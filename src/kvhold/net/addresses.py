"""Loopback addresses, and networks of addresses."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or `localhost`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def network_of(host: str) -> str:
    """Return the network of an address: itself for IPv4, its /64 for IPv6.

    One host may have all addresses of a /64.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    if address.version == 4 or mapped:
        return str(mapped or address)
    return str(ipaddress.ip_network((address, 64), strict=False))
