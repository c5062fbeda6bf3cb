"""A network namespace as a second host."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhold_lab.bench.second_host import NoSecondHost, second_host

_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)"

_SEND = (
    "import socket, sys; "
    "socket.create_connection((sys.argv[1], int(sys.argv[2])), 30).sendall(bytes(2_000_000))"
)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_it_reaches_this_host_and_is_removed() -> None:
    try:
        with second_host() as host, socket.create_server((host.here, 0)) as server:
            port = str(server.getsockname()[1])
            subprocess.run(
                [*host.enter, sys.executable, "-c", _CONNECT, host.here, port], check=True
            )
            server.settimeout(30)
            connection, (address, _) = server.accept()
            connection.close()
            assert address == host.address
            command = [*host.enter, sys.executable, "-c", _CONNECT, "127.0.0.1", port]
            assert subprocess.run(command, capture_output=True).returncode, "its own loopback"
            assert host.name in namespaces()
    except NoSecondHost as error:
        pytest.skip(str(error))
    assert host.name not in namespaces()


def test_its_network_may_be_slow() -> None:
    """Two megabytes over 40 Mbit/s, of which the queue takes the first 256 KiB at once."""
    try:
        with second_host(mbit_s=40) as host, socket.create_server((host.here, 0)) as server:
            port = str(server.getsockname()[1])
            sending = subprocess.Popen(
                [*host.enter, sys.executable, "-c", _SEND, host.here, port],
            )
            server.settimeout(30)
            connection, _ = server.accept()
            with connection:
                began_s, left = time.monotonic(), 2_000_000
                while left:
                    left -= len(connection.recv(1 << 16))
                assert time.monotonic() - began_s > 0.3
            assert sending.wait(30) == 0
    except NoSecondHost as error:
        pytest.skip(str(error))


def test_without_its_program_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSecondHost, match="iproute2"), second_host():
        pass
