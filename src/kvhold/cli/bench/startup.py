"""What it costs to have kvhold at all: its import, a node's start, a node's memory beside the arena.

The limits are the same of a bare interpreter, and for the node of an interpreter that imports only the libraries it stands on.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from kvhold.cli.bench.rows import Row

ROUNDS = 7
_LIBRARIES = "import asyncio, click, msgspec, numpy"
_PRINT_RESIDENT = "; p = open('/proc/self/statm').read().split(); print((int(p[1]) - int(p[2])) * 4096)"


def rows() -> list[Row]:
    """Measure whole processes, in turn. Takes some 10 seconds."""
    importing, bare, ready, libraries, resident = [], [], [], [], []
    for _ in range(ROUNDS):
        importing.append(_timed("import kvhold"))
        bare.append(_timed("pass"))
        libraries.append(_timed(_LIBRARIES))
        started_s, node_bytes = _start_node()
        ready.append(started_s)
        resident.append(node_bytes)
    least = int(subprocess.run([sys.executable, "-c", _LIBRARIES + _PRINT_RESIDENT], check=True, capture_output=True).stdout)
    return [
        _time_row("interpreter with import kvhold", importing, bare),
        _time_row("node, from start to ready", ready, libraries),
        Row("node, memory beside the arena", median(resident) / 1e6, "MB", least / 1e6, least / median(resident)),
    ]


def _time_row(name: str, taken_s: list[float], limit_s: list[float]) -> Row:
    value, limit = median(taken_s) * 1e3, median(limit_s) * 1e3
    return Row(name, value, "ms", limit, limit / value)


def _timed(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def _start_node() -> tuple[float, int]:
    """Seconds until a node with an arena of 1 GiB says that it is ready, and its memory then without the arena."""
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder:
        command = [sys.executable, "-m", "kvhold", "serve", "--socket", str(Path(folder) / "node.sock"), "--ram-bytes", "1GiB"]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as node:
            assert node.stdout is not None
            line = node.stdout.readline()
            started_s = time.perf_counter() - began
            pages = Path(f"/proc/{node.pid}/statm").read_text().split() if line else ["0", "0", "0"]
            node.terminate()
    assert line.startswith(b"kvhold node ready"), "the node did not start"
    return started_s, (int(pages[1]) - int(pages[2])) * 4096
