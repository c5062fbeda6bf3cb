"""A child process whose output goes to a log, and the error that quotes the log's end. Shared by the demo's engines and servers."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from kvhold.core.errors import KVHoldError

_LOG_TAIL_BYTES = 3_000


class EngineFailed(KVHoldError):
    """An engine did not start, died, refused or went silent. The message says which, and ends with the end of its log."""


class LoggedProcess:
    """A running child. It has a process group of its own: Ctrl-C is for the caller, who then ends the child.

    name: what errors call it.
    log_path: where its output goes; by default a file that goes away with it.
    environment: variables besides those of this process.
    pipes: whether standard input and output are pipes to the caller, instead of nothing and the log.
    """

    def __init__(
        self, name: str, argv: Sequence[str], *, log_path: Path | None, environment: Mapping[str, str], pipes: bool = False
    ) -> None:
        self._name = name
        self._log_path = log_path
        self._last_words = ""
        # closed by kill
        self._log: BinaryIO = log_path.open("wb+") if log_path is not None else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else self._log,
            stderr=self._log,
            env={**os.environ, **environment},
            bufsize=0,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def input(self) -> IO[bytes]:
        assert self._process.stdin is not None, "started without pipes"
        return self._process.stdin

    @property
    def output(self) -> IO[bytes]:
        assert self._process.stdout is not None, "started without pipes"
        return self._process.stdout

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; false if it still runs after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and what it started in its process group, at once, as a crash would. What has a session of its own lives on.

        Closes the pipes and the log. Whoever starts a process must call this at the end, even if the process has ended by then.
        """
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the group is still this child's
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if not self._log.closed:
            self._last_words = self.log_tail()
            self._log.close()

    def log_tail(self) -> str:
        """The end of what it has printed."""
        if self._log.closed:
            return self._last_words
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))  # the child writes at the shared offset
        return tail.decode(errors="replace")

    def failure(self, doing: str, what: str | None = None) -> EngineFailed:
        """The error for `doing`; without `what` it says how the process ended."""
        if what is None:
            code = self._process.poll()
            what = f"died by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        where = f" ({self._log_path})" if self._log_path is not None else ""
        return EngineFailed(f"{doing}: {self._name} (pid {self.pid}) {what}; the end of its log{where}:\n{self.log_tail()}")
