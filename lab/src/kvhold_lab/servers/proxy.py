import os
import sys
import urllib.request
from collections.abc import Sequence

from kvhold_lab.servers.base import ServerProcess

_ANSWER_S = 30.0


class ProxyProcess(ServerProcess):
    """Ready when a decode engine is usable. settings: such as KVHOLD_PROXY_PROTOCOL"""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], **settings: str) -> None:
        super().__init__()
        self._prefill = tuple(prefill)
        self._decode = tuple(decode)
        self._settings = settings

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        engines = [
            *(text for url in self._prefill for text in ("--prefill", url)),
            *(text for url in self._decode for text in ("--decode", url)),
        ]
        listen = f"127.0.0.1:{self.port}"
        return [sys.executable, "-m", "kvhold", "proxy", "--listen", listen, *engines]

    def environ(self) -> dict[str, str]:
        return {**os.environ, **self._settings}

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/health/ready", timeout=1):
            return True

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=_ANSWER_S) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}
