import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvhold.core.errors import KVHoldError
from kvhold_lab.bench.compare_engines.child import ChildOptions
from kvhold_lab.engines.process import EngineFailed, LoggedProcess

KVHOLD = "kvhold"
KVHOLD_CACHED = "kvhold, page cache"
IN_PROCESS = "lmcache in-process"
SERVER = "lmcache server"
DRIVEN = "lmcache server, lmcache-driven"
MODES = {
    KVHOLD: "node",
    KVHOLD_CACHED: "node, page cache",
    IN_PROCESS: "in-process",
    SERVER: "engine-driven",
    DRIVEN: "lmcache-driven",
}
SYSTEMS = tuple(MODES)
OURS = (KVHOLD, KVHOLD_CACHED)
SERVERS = (SERVER, DRIVEN)
DISK_LIMITS = {
    "limit: O_DIRECT": True,
    "limit: page cache": False,
}
CHECKED_LIMIT = "limit: page cache, check, copy"
REDIS_LIMIT = "limit: Redis"
LIMITS = (*DISK_LIMITS, CHECKED_LIMIT, REDIS_LIMIT)

_ANSWER_S = 90.0
_HERE = Path(__file__).parent


class PeerFailed(KVHoldError):
    """The message is the system's."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seconds: float = 0.0
    written_s: float = 0.0
    num_tokens: int = 0
    nbytes: int = 0
    checksum: str = ""
    error: str = ""


class PeerSystem:
    def __init__(
        self, name: str, exchange: Callable[[bytes, str], bytes], end: Callable[[], None]
    ) -> None:
        self.name = name
        self._exchange = exchange
        self._end = end

    def do(self, operation: str, **arguments: Any) -> Answer:
        line = msgspec.json.encode({"op": operation, **arguments})
        try:
            answer = msgspec.json.decode(
                self._exchange(line, f"{operation} by {self.name}"), type=Answer
            )
        except (EngineFailed, msgspec.DecodeError) as error:
            raise PeerFailed(str(error)) from error
        if answer.error:
            raise PeerFailed(answer.error)
        return answer

    def close(self) -> None:
        self._end()


def launch(name: str, *, python: Path | None, threads: int) -> PeerSystem:
    if name in OURS:
        command = [
            sys.executable,
            "-P",
            "-m",
            f"{__package__}.child",
            f"{__package__}.kvhold_child",
        ]
    else:
        assert python is not None
        command = [str(python), str(_HERE / "child.py"), "lmcache_child", "torch"]
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0"}
    process = LoggedProcess(name, command, log_path=None, environment=environment, pipes=True)

    def end() -> None:
        process.kill()
        for left in Path("/dev/shm").glob(f"*kvhold_bench_{process.pid}"):
            left.unlink(missing_ok=True)

    return PeerSystem(name, lambda line, doing: process.ask(line, doing, _ANSWER_S), end)


def start(peer: PeerSystem, options: ChildOptions) -> float:
    return peer.do("start", **asdict(options)).seconds


def new_folder(within: Path) -> str:
    return tempfile.mkdtemp(dir=within)


def import_command(name: str, *, client: bool, python: Path | None) -> list[str]:
    ours = "kvhold.node, kvhold.memory.copy, kvhold.memory.views" if client else "kvhold"
    theirs = (
        "lmcache.v1.multiprocess.transfer_context, lmcache.v1.multiprocess.transport.factory"
        if client
        else "lmcache"
    )
    executable, modules = (sys.executable, ours) if name in OURS else (str(python), theirs)
    return [executable, "-c", f"import {modules}"]


def cores() -> int:
    return len(os.sched_getaffinity(0))
