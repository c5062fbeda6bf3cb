import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from kvhold_lab.bench.profiles import Profiles
from kvhold_lab.bench.rows import Row, time_row
from kvhold_lab.bench.servers import serve_command

ROUNDS = 7
_LIBRARIES = "import asyncio, click, msgspec, numpy"
_NODE = "import kvhold.cli.serve"
_PRINT_RESIDENT = (
    "; p = open('/proc/self/statm').read().split(); print((int(p[1]) - int(p[2])) * 4096)"
)


def rows(profiles: Profiles | None = None) -> list[Row]:
    profiles = profiles or Profiles()
    importing, bare, ready, libraries, resident = [], [], [], [], []
    for _ in range(ROUNDS):
        importing.append(_timed("import kvhold"))
        bare.append(_timed("pass"))
        libraries.append(_timed(_LIBRARIES))
        started_s, node_bytes = _start_node()
        ready.append(started_s)
        resident.append(node_bytes)
    least = int(
        subprocess.run(
            [sys.executable, "-c", _LIBRARIES + _PRINT_RESIDENT], check=True, capture_output=True
        ).stdout
    )
    memory = Row(
        "node, memory beside the arena",
        median(resident) / 1e6,
        "MB",
        least / 1e6,
        least / median(resident),
    )
    return [
        profiles.of(
            time_row("interpreter with import kvhold", median(importing), median(bare)),
            lambda: _imports("import kvhold"),
        ),
        profiles.of(
            time_row("node, from start to ready", median(ready), median(libraries)),
            lambda: _imports(_NODE),
        ),
        profiles.of(memory, _memory_by_file),
    ]


def _imports(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], check=True, capture_output=True, text=True
    ).stderr


def _memory_by_file() -> str:
    code = (
        f"{_NODE}, tracemalloc\nfor line in "
        "tracemalloc.take_snapshot().statistics('filename')[:40]: print(line)"
    )
    return subprocess.run(
        [sys.executable, "-X", "tracemalloc", "-c", code],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def _timed(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def _start_node() -> tuple[float, int]:
    with tempfile.TemporaryDirectory(prefix="kvhold-bench-") as folder:
        command = serve_command("--socket", str(Path(folder) / "node.sock"), "--ram-bytes", "1GiB")
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as node:
            assert node.stdout is not None
            line = node.stdout.readline()
            started_s = time.perf_counter() - began
            pages = Path(f"/proc/{node.pid}/statm").read_text().split() if line else ["0", "0", "0"]
            node.terminate()
    assert line.startswith(b"kvhold node ready"), "the node did not start"
    return started_s, (int(pages[1]) - int(pages[2])) * 4096
