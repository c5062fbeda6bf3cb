"""A real central cache: `kvhold serve --listen`, on a free loopback port."""

import os
import sys
from collections.abc import Mapping, Sequence

from kvhold.testing.servers.base import ServerProcess


class CentralServer(ServerProcess):
    """`arguments` go to `kvhold serve`, beside the address and the size; `environ` is added to its
    environment.
    """

    def __init__(
        self, *arguments: str, ram_bytes: str = "64MiB", environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._environ = dict(environ or {})
        self._arguments = ("--ram-bytes", ram_bytes, *arguments)

    @property
    def url(self) -> str:
        """Where it listens, as a tier."""
        return f"kvhold://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        """`kvhold serve`."""
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
        """Without settings of the user's."""
        return {
            name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")
        } | self._environ
