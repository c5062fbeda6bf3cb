"""A Mooncake Store's master; its clients provide the memory."""

import importlib.util
import sys
from collections.abc import Sequence
from urllib.parse import urlencode

from kvhold_lab.servers.base import NotInstalled, ServerProcess, free_port

LEASE_MS = 1000  # after a read: a longer get misses, and no removal is possible


class MooncakeMaster(ServerProcess):
    def __init__(self) -> None:
        super().__init__()
        self.admin_port = free_port()

    def command(self) -> Sequence[str]:
        if importlib.util.find_spec("mooncake") is None:
            raise NotInstalled(
                "mooncake is not installed here: pip install "
                "mooncake-transfer-engine-non-cuda (and apt's libibverbs1)"
            )
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.admin_port,
            "default_kv_lease_ttl": LEASE_MS,
            "logtostderr": "true",
        }
        return [
            sys.executable,
            "-m",
            "mooncake.cli",
            *(f"--{name}={value}" for name, value in flags.items()),
        ]

    def url(self, **options: object) -> str:
        settings = {"admin": f"127.0.0.1:{self.admin_port}", "allow_all_interfaces": "true"}
        return f"mooncake://127.0.0.1:{self.port}?{urlencode(settings | options)}"
