"""vllm-router, in a process of its own: `with VLLMRouter("--worker-urls", url) as router`."""

import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from kvhold_lab.servers.base import ServerProcess, free_port
from tests.programs import reason_without
from tools.setup_env import router_folder

FOLDER = router_folder(Path(sys.prefix))
WHY_NOT = None if FOLDER.is_dir() else reason_without("vllm-router")


class VLLMRouter(ServerProcess):
    """Ready when its engines are. flags: without addresses of its own"""

    def __init__(self, *flags: str) -> None:
        super().__init__()
        self._flags = flags
        self._metrics_port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        own = ["--port", str(self.port), "--prometheus-port", str(self._metrics_port)]
        own += ["--worker-startup-check-interval", "1"]
        return [sys.executable, "-m", "vllm_router.launch_router", *own, *self._flags]

    def environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(FOLDER)}

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/readiness", timeout=5):
            return True
