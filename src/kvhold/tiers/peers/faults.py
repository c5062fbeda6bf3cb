"""The faults of one peer.

TierError
 ├─ PeerProtocol         it breaks the protocol
 ├─ TierUnavailable
 │   ├─ PeerGone         no connection, or it was restarted
 │   ├─ PeerSlow         no answer in time
 │   └─ PeerRefuses      another version, or too many connections
 └─ TierDenied
     └─ PeerDenied       the token or a certificate is not accepted

`cause` is one word for metrics and tables, `advice` a sentence for `kvhold doctor`.
"""

import socket
import ssl
from typing import Literal

from kvhold.core.errors import ProtocolError, TierDenied, TierError, TierUnavailable
from kvhold.core.reasons import PEER_DENIED, PEER_GONE, PEER_SLOW
from kvhold.net.login import LoginRefused, quoted
from kvhold.net.stream import Address

TIER = "peers"

Cause = Literal[
    "name",
    "port",
    "network",
    "silent",
    "closed",
    "restarted",
    "tls",
    "slow",
    "version",
    "busy",
    "token",
    "certificate",
    "protocol",
]

ADVICE: dict[Cause, str] = {
    "name": "this host does not know the name: correct it in tiers, or in the name service",
    "port": (
        "nothing listens there: start the peer's node with peers.listen, or correct the port in "
        "tiers"
    ),
    "network": "check the network and the firewalls between the hosts",
    "silent": (
        "check that the peer's host runs and that no firewall drops the packets; a node that "
        "hangs is silent, too"
    ),
    "closed": (
        "the peer ended the connection: see its log. If it has peers.tls_cert, add tls=true here"
    ),
    "restarted": "nothing: its new chunks are being learned",
    "tls": "no TLS is spoken there: set peers.tls_cert at the peer, or remove tls=true here",
    "slow": (
        "the peer or the network is overloaded: see `kvhold peers` there; answer_timeout_s is the "
        "deadline"
    ),
    "version": "upgrade kvhold on the older host: versions may differ by one",
    "busy": "raise peers.max_connections at the peer, or lower connections in tiers",
    "token": "set token_file here to the token of peers.token_file at the peer",
    "certificate": (
        "compare ca_file here with the authority of peers.tls_cert there, which must name this "
        "address; if peers.tls_client_ca is set there, set cert_file here"
    ),
    "protocol": "it is not a node's peers.listen: correct the port in tiers",
}


class PeerFault(TierError):
    def __init__(self, operation: str, address: Address, cause: Cause, detail: str) -> None:
        super().__init__(TIER, operation, f"{address}: {quoted(detail, 300)}")
        self.cause: Cause = cause

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]


class PeerProtocol(PeerFault):
    pass


class PeerGone(PeerFault, TierUnavailable):
    miss = PEER_GONE


class PeerSlow(PeerFault, TierUnavailable):
    miss = PEER_SLOW


class PeerRefuses(PeerFault, TierUnavailable):
    miss = PEER_DENIED


class PeerDenied(PeerFault, TierDenied):
    miss = PEER_DENIED


def refusal_of(address: Address, refused: LoginRefused) -> PeerFault:
    if refused.denied:
        return PeerDenied("connect", address, "token", refused.reason)
    cause: Cause = "version" if refused.is_other_version else "busy"
    return PeerRefuses("connect", address, cause, refused.reason)


def fault_of(operation: str, address: Address, error: Exception) -> PeerFault:
    text = str(error) or type(error).__name__
    match error:
        case PeerFault():
            return error
        case ProtocolError() | ValueError() if not isinstance(error, ssl.SSLError):
            return PeerProtocol(
                operation,
                address,
                "protocol",
                f"is not a node for peers of this version: {text}",
            )
        case ssl.SSLCertVerificationError():
            text = f"its certificate is not accepted: {text}"
            return PeerDenied(operation, address, "certificate", text)
        case ssl.SSLError():
            if "CERTIFICATE" in text or "UNKNOWN_CA" in text:
                text = f"it does not accept this node's certificate: {text}"
                return PeerDenied(operation, address, "certificate", text)
            return PeerGone(operation, address, "tls", text)
        case socket.gaierror():
            return PeerGone(operation, address, "name", text)
        case ConnectionRefusedError():
            return PeerGone(operation, address, "port", text)
        case TimeoutError():
            return PeerGone(operation, address, "silent", text)
        case EOFError() | ConnectionError():
            return PeerGone(operation, address, "closed", text)
    return PeerGone(operation, address, "network", text)
