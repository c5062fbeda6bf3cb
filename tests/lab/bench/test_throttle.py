"""The slow link passes every byte, both ways, and no faster than it says."""

import socket
import threading
import time

from kvhold_lab.bench.throttle import Throttle


def echo(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            while piece := connection.recv(1 << 16):
                connection.sendall(piece)


def test_bytes_come_through_and_take_their_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with (
            Throttle(listener.getsockname(), bytes_per_s=4e6) as link,
            socket.create_connection(("127.0.0.1", link.port)) as client,
        ):
            sent, began = bytes(range(256)) * 4_000, time.monotonic()

            def send() -> None:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)

            threading.Thread(target=send, daemon=True).start()
            received = bytearray()
            while piece := client.recv(1 << 16):
                received += piece
            took_s = time.monotonic() - began
            assert received == sent
            assert link.down_bytes == len(sent)
            assert took_s >= 0.9 * len(sent) / 4e6, "a lower limit: a busy machine is only slower"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_target_that_is_not_there_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with (
        Throttle(address, bytes_per_s=1e6) as link,
        socket.create_connection(("127.0.0.1", link.port)) as client,
    ):
        assert client.recv(1) == b""
