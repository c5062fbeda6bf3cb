"""A fork of kvhold is a process like one that was started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.forks import forking

KVHOLD = [sys.executable, "-m", "kvhold"]


def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*KVHOLD, *arguments], env=os.environ | environ, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "status"),
    [
        (("--version",), {}, 0),
        (("no-command",), {}, 2),
        (("tiers",), {"KVHOLD_LOG_LEVEL": "loud"}, 1),
    ],
)
def test_it_says_and_returns_the_same(
    arguments: tuple[str, ...], environ: dict[str, str], status: int
) -> None:
    with forking(allowed=False):
        executed = run(*arguments, **environ)
    assert run(*arguments, **environ) == executed
    assert executed[0] == status


def test_it_is_a_child_with_the_folder_and_session_it_was_given(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*KVHOLD, "serve", "--socket", "s", "--ram-bytes", "4MiB"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as node:
        assert node.stdout is not None
        assert str(tmp_path / "s").encode() in node.stdout.readline()
        child = psutil.Process(node.pid)
        assert child.cmdline()[2] == "tests.forks"
        assert (child.ppid(), os.getsid(node.pid)) == (os.getpid(), node.pid)
        assert child.num_fds() < 40
        node.kill()
    assert node.returncode == -signal.SIGKILL
