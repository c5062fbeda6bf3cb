"""Runs in a network of its own: a DNS server on port 53, two peers, and a tier that follows them.

Prints as JSON what the tier lists while the server's answers change.
"""

import asyncio
import json
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvhold.testing.tier import fetch, make_key
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.registry import make_tier
from tests.tiers.peer_places import eventually, eventually_found, served

PORT = 7711
A, AAAA = 1, 28
NXDOMAIN = 3


class DnsServer(asyncio.DatagramProtocol):
    """Answers questions for one name from `records`; None: with silence."""

    def __init__(self) -> None:
        self.records: dict[int, list[bytes]] | None = {}
        self.code = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, sender: Any) -> None:
        if self.records is None:
            return
        end = data.index(b"\0", 12) + 5
        [kind] = struct.unpack("!H", data[end - 4 : end - 2])
        found = [] if self.code else self.records.get(kind, [])
        header = data[:2] + struct.pack("!HHHHH", 0x8180 | self.code, 1, len(found), 0, 0)
        answers = b"".join(
            struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(address)) + address for address in found
        )
        self._transport.sendto(header + data[12:end] + answers, sender)


def listed(tier: PeersTier) -> list[str]:
    return [peer.address.host for peer in tier.peers]


async def run() -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    transport, dns = await loop.create_datagram_endpoint(DnsServer, ("127.0.0.1", 53))
    four, six = socket.inet_aton("127.0.0.2"), socket.inet_pton(socket.AF_INET6, "::1")
    both = {A: [four], AAAA: [six]}
    dns.records = both
    told: dict[str, Any] = {}
    tier, _ = make_tier(f"peers-dns://peers.example:{PORT}?refresh_s=0.05&answer_timeout_s=60")
    assert isinstance(tier, PeersTier)

    def fault() -> str:
        return tier.peers_status()["list_fault"]

    async def until(condition: Callable[[], Any]) -> list[str]:
        await eventually(condition)
        return sorted(listed(tier))

    async with served(host="127.0.0.2", port=PORT) as v4, served(host="[::1]", port=PORT) as v6:
        v4.put(make_key(1), b"over v4")
        v6.put(make_key(2), b"over v6")
        await tier.check()
        told["both families"] = sorted(listed(tier))
        await eventually_found(tier, make_key(1), 7)
        await eventually_found(tier, make_key(2), 7)
        values = await fetch(tier, [make_key(1), make_key(2)], [7, 7])
        told["bytes"] = [bytes(value or b"").decode() for value in values]
        dns.records = {AAAA: [six]}
        told["fewer"] = await until(lambda: listed(tier) == ["::1"])
        dns.code = NXDOMAIN
        told["kept"] = await until(fault)
        told["unknown"] = fault()
        dns.records, dns.code = None, 0
        await until(lambda: "not known" not in fault())
        told["silent"] = fault()
        dns.records = both
        told["back"] = await until(lambda: len(listed(tier)) == 2)
        await tier.close()
    transport.close()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run())))
