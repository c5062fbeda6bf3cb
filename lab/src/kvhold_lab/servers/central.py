import os
import sys
from collections.abc import Mapping, Sequence

from kvhold_lab.servers.base import ServerProcess


class CentralServer(ServerProcess):
    def __init__(
        self, *arguments: str, ram_bytes: str = "64MiB", environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._environ = dict(environ or {})
        self._arguments = ("--ram-bytes", ram_bytes, *arguments)

    @property
    def url(self) -> str:
        return f"kvhold://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return (
            sys.executable,
            "-m",
            "kvhold",
            "serve",
            "--listen",
            f"127.0.0.1:{self.port}",
            *self._arguments,
        )

    def environ(self) -> dict[str, str]:
        return {
            name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")
        } | self._environ
