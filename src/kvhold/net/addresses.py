"""Addresses of hosts: which are this host's own, and which of them count as one.

is_loopback("127.0.0.1"), network_of("2001:db8::1")       # True, "2001:db8::/64"
"""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host` can only be this host: an address of its loopback interface, or `localhost`. Other names are not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def network_of(host: str) -> str:
    """Whose address it is: an IPv4 address stands for itself, an IPv6 address for its /64, all of which one host may have."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    if address.version == 4 or mapped:
        return str(mapped or address)
    return str(ipaddress.ip_network((address, 64), strict=False))
