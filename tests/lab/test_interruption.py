"""A command that is told to end ends what it has started."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhold_lab.interruption import ending_in_order
from kvhold_lab.servers.base import NotInstalled, ServerProcess, program

WITHIN_S = 60.0


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listens(redis: int) -> bool:
    """Whether that process, if it is a Redis, is ready: it writes its address over its command
    line.
    """
    host, _, port = (
        Path(f"/proc/{redis}/cmdline").read_text().strip("\0 ").rpartition(" ")[2].rpartition(":")
    )
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, ValueError):
        return False
    return True


def test_sigterm_is_an_exit_and_what_was_before_is_so_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)), ending_in_order():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.server
def test_a_bench_that_is_told_to_end_leaves_no_server() -> None:
    try:
        program("redis-server", "apt-get install redis-server")
    except NotInstalled as error:
        pytest.skip(str(error))
    with subprocess.Popen(
        [sys.executable, "-m", "kvhold", "bench", "tiers", "--tier", "redis"],
        stdout=subprocess.DEVNULL,
    ) as bench:
        until = time.monotonic() + WITHIN_S
        while not any(map(listens, servers := children_of(bench.pid))):
            assert bench.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(WITHIN_S) == 128 + signal.SIGTERM
    while any(Path(f"/proc/{server}/stat").exists() for server in servers):
        assert time.monotonic() < until + WITHIN_S
        time.sleep(0.05)


def test_a_server_is_ended_though_a_signal_interrupts_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    class Sleeper(ServerProcess):
        def command(self) -> list[str]:
            return ["sleep", "600"]

    def interrupted(process: subprocess.Popen[bytes], *args: object, **options: object) -> None:
        start(process, *args, **options)
        started.append(process.pid)
        # as a signal's handler does while `Popen` waits for the exec
        raise SystemExit(128 + signal.SIGTERM)

    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    monkeypatch.setattr(subprocess.Popen, "_execute_child", interrupted)
    with pytest.raises(SystemExit), Sleeper():
        pass
    assert not Path(f"/proc/{started[0]}").exists()
