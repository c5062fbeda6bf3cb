"""The faults of a peer: each has a cause, a reason for misses, and advice."""

import re
import socket
import ssl
from pathlib import Path

import pytest

from kvhold.core.errors import ProtocolError
from kvhold.core.reasons import PEER_DENIED, PEER_GONE, TIER_DOWN
from kvhold.net.login import LoginRefused
from kvhold.net.stream import Address
from kvhold.tiers.peers.faults import ADVICE, fault_of, refusal_of

PAGE = (Path(__file__).parents[2] / "docs/peers.md").read_text()
ADDRESS = Address("host-b", 7711)
ALERT = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert")


def test_the_page_has_a_row_for_each_cause_with_its_advice() -> None:
    section = PAGE.split("\n## Faults\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
    assert rows == ADVICE


@pytest.mark.parametrize(
    ("error", "cause", "miss"),
    [
        (socket.gaierror(-2, "Name or service not known"), "name", PEER_GONE),
        (ConnectionRefusedError(111, "Connection refused"), "port", PEER_GONE),
        (TimeoutError("silent for 5 s"), "silent", PEER_GONE),
        (ConnectionResetError(104, "reset"), "closed", PEER_GONE),
        (EOFError("the server closed the connection"), "closed", PEER_GONE),
        (OSError(113, "No route to host"), "network", PEER_GONE),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"), "tls", PEER_GONE),
        (ssl.SSLCertVerificationError(1, "hostname mismatch"), "certificate", PEER_DENIED),
        (ALERT, "certificate", PEER_DENIED),
        (ProtocolError("junk"), "protocol", TIER_DOWN),
        (ValueError("a clear of 1 bytes"), "protocol", TIER_DOWN),
    ],
)
def test_each_error_has_its_cause(error: Exception, cause: str, miss: str) -> None:
    fault = fault_of("get", ADDRESS, error)
    assert (fault.cause, fault.miss) == (cause, miss)
    assert "host-b:7711" in str(fault)
    assert fault_of("follow", ADDRESS, fault) is fault


@pytest.mark.parametrize(
    ("refused", "cause"),
    [
        (LoginRefused("a token is needed", denied=True), "token"),
        (LoginRefused("another version", is_other_version=True), "version"),
        (LoginRefused("peers.max_connections = 1 are in use"), "busy"),
    ],
)
def test_each_refusal_has_its_cause(refused: LoginRefused, cause: str) -> None:
    fault = refusal_of(ADDRESS, refused)
    assert (fault.cause, fault.miss) == (cause, PEER_DENIED)


def test_what_a_peer_says_is_printable_and_short() -> None:
    text = str(refusal_of(ADDRESS, LoginRefused("\x1b[2Jroot\n" + "x" * 5000)))
    assert text.isprintable()
    assert len(text) < 400
