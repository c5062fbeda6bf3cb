"""kvhold's servers in processes of their own. Calls raise NodeError if one does not start.

under: arguments for the interpreter, such as a profiler.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvhold.core.config import ClientConfig
from kvhold.core.errors import NodeError
from kvhold.node import NodeClient

_PATIENCE_S = 60.0


def serve_command(*arguments: str, under: Sequence[str] = ()) -> list[str]:
    return [sys.executable, *under, "-m", "kvhold", "serve", *arguments]


@contextmanager
def running_node(
    under: Sequence[str] = (), *, log_level: str = "WARNING", ram_bytes: int = 64 << 20
) -> Iterator[NodeClient]:
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder:
        path = Path(folder) / "node.sock"
        with (
            serving(["--socket", str(path)], under, log_level, ram_bytes),
            NodeClient(path, name="kvhold bench") as client,
        ):
            yield client


@dataclass(frozen=True)
class RunningPeer:
    client: NodeClient
    socket: Path
    address: str


@contextmanager
def running_peer(
    *tiers: str, ram_bytes: int = 64 << 20, channel: str = "tcp"
) -> Iterator[RunningPeer]:
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder:
        path, settings = Path(folder) / "node.sock", Path(folder) / "kvhold.toml"
        settings.write_text(
            f"tiers = {json.dumps(tiers)}\n"
            f'[peers]\nlisten = "127.0.0.1:0"\nchannel = {json.dumps(channel)}\n'
        )
        patient = ClientConfig(call_timeout_s=_PATIENCE_S, arrival_timeout_s=_PATIENCE_S)
        with (
            serving(
                ["--config", str(settings), "--socket", str(path)], ram_bytes=ram_bytes
            ) as ready,
            NodeClient(path, patient, name="kvhold bench") as client,
        ):
            yield RunningPeer(client, path, ready.rpartition("peers on ")[2].strip())


@contextmanager
def running_central(under: Sequence[str] = ()) -> Iterator[str]:
    with serving(["--listen", "127.0.0.1:0"], under) as ready:
        yield f"kvhold://{ready.split(' ready on ')[1].split(': ')[0]}"


@contextmanager
def serving(
    arguments: Sequence[str],
    under: Sequence[str] = (),
    log_level: str = "WARNING",
    ram_bytes: int = 64 << 20,
) -> Iterator[str]:
    command = serve_command("--ram-bytes", str(ram_bytes), *arguments, under=under)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")
    } | {"KVHOLD_LOG_LEVEL": log_level}
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-bench-state-") as state,
        subprocess.Popen(
            command, env=environ | {"XDG_STATE_HOME": state}, stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            if " ready on " not in ready:
                raise NodeError("kvhold serve did not start; what it said stands above")
            yield ready
        finally:
            server.terminate()
