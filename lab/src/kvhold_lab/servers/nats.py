import socket
from collections.abc import Sequence

from kvhold_lab.servers.base import ServerProcess, program
from kvhold_lab.servers.certificates import Certificates, make_certificates

_ANSWER_S = 1.0


class NatsServer(ServerProcess):
    """tls: with `certificates` only; user, password, token: the required login"""

    def __init__(
        self, *, tls: bool = False, user: str = "", password: str = "", token: str = ""
    ) -> None:
        super().__init__()
        self._tls = tls
        self._login = {"username": user, "password": password, "token": token}
        self._made: Certificates | None = None

    @property
    def certificates(self) -> Certificates:
        if self._made is None:
            self._made = make_certificates(self.folder)
        return self._made

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=_ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            return connection.recv(5) == b"INFO "

    def command(self) -> Sequence[str]:
        nats = program("nats-server", "apt-get install nats-server")
        data = self.folder / "data"
        lines = [
            f"listen: 127.0.0.1:{self.port}",
            f"jetstream: {{ store_dir: {str(data)!r}, max_mem: 4GB, max_file: 1GB }}",
        ]
        if given := [f"{name}: {value!r}" for name, value in self._login.items() if value]:
            lines.append(f"authorization: {{ {', '.join(given)} }}")
        if self._tls:
            made = self.certificates
            files = f"cert_file: {str(made.server)!r}, key_file: {str(made.server_key)!r}"
            lines.append(f"tls: {{ {files} }}")
        config = self.folder / "nats.conf"
        config.write_text("\n".join(lines) + "\n")
        config.chmod(0o600)
        return [nats, "--config", str(config)]
