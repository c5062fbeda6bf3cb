"""A child process with a log. A silent child is killed."""

import contextlib
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from kvhold.core.errors import KVHoldError
from kvhold_lab.engines.preloaded import ForkedProcess, spawn

_LOG_TAIL_BYTES = 3_000
_STACKS_TAIL_BYTES = 12_000
_SEARCHED_BYTES = 64 << 10
_ERROR = re.compile(r"(?<!`)\b\w+(?:Error|Exception): .{1,300}")  # `quoted`: only warned of
_STACKS_WAIT_S = 5.0


class EngineFailed(KVHoldError):
    """It did not start, died, refused or went silent."""


class LoggedProcess:
    """In its own process group, so Ctrl-C reaches only the caller.

    preloads: `argv` is Python's with -m and a module that imports vLLM
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path | None,
        environment: Mapping[str, str],
        pipes: bool = False,
        preloads: bool = False,
    ) -> None:
        self._name = name
        self._log_path = log_path
        self._last_words = ""
        self._log: BinaryIO = (
            log_path.open("wb+") if log_path is not None else tempfile.TemporaryFile()  # noqa: SIM115
        )
        environment = {**os.environ, **environment}
        forked = spawn(argv[2], argv[3:], environment, self._log, pipes=pipes) if preloads else None
        self._process: ForkedProcess | subprocess.Popen[bytes] = forked or subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else self._log,
            stderr=self._log,
            env=environment,
            bufsize=0,
            process_group=0,
        )
        self._unread = b""
        self._tail_bytes = _LOG_TAIL_BYTES

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, doing: str, timeout_s: float) -> bytes:
        """Return the answer without line end.

        Raises EngineFailed. A late child is killed: the next call would get its answer.
        """
        if not self.is_alive:
            raise self.failure(doing)
        deadline = time.monotonic() + timeout_s
        try:
            self._send(line + b"\n", doing, deadline)
        except BrokenPipeError:
            self.kill()
            raise self.failure(doing) from None
        return self._read_line(doing, deadline)

    def terminate(self) -> None:
        self._process.terminate()

    def signal(self, number: signal.Signals) -> None:
        """No effect after the process's end."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Needed even after the process's end."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if not self._log.closed:
            self._last_words = self.log_tail()
            self._log.close()

    def log_tail(self, nbytes: int = 0) -> str:
        """nbytes: 0: the default"""
        if self._log.closed:
            return self._last_words
        size, nbytes = os.fstat(self._log.fileno()).st_size, nbytes or self._tail_bytes
        tail = os.pread(self._log.fileno(), nbytes, max(0, size - nbytes))
        return tail.decode(errors="replace")

    def failure(self, doing: str, what: str | None = None) -> EngineFailed:
        if what is None:
            code = self._process.poll()
            what = (
                f"died by {signal.Signals(-code).name}"
                if code is not None and code < 0
                else f"ended with exit code {code}"
            )
        where = f" ({self._log_path})" if self._log_path is not None else ""
        # an engine's parent has the last word, but not the cause
        found = _ERROR.search(self.log_tail(_SEARCHED_BYTES))
        first = f"; its first error: {found[0]}" if found else ""
        return EngineFailed(
            f"{doing}: {self._name} (pid {self.pid}) {what}{first}; the end of its "
            f"log{where}:\n{self.log_tail()}"
        )

    def _send(self, data: bytes, doing: str, deadline: float) -> None:
        pipe = _descriptor(self._process.stdin)
        os.set_blocking(pipe, False)
        rest = memoryview(data)
        while rest:
            if not select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))[1]:
                raise self._silent(doing)
            rest = rest[os.write(pipe, rest) :]

    def _read_line(self, doing: str, deadline: float) -> bytes:
        pipe = _descriptor(self._process.stdout)
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._silent(doing)
            data = os.read(pipe, 1 << 16)
            if not data:
                self.wait(timeout_s=5.0)
                raise self.failure(doing)
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _silent(self, doing: str) -> EngineFailed:
        self._dump_stacks()
        self.kill()
        return self.failure(doing, "was silent for too long and was killed")

    def _dump_stacks(self) -> None:
        """Without faulthandler the signal ends the child."""
        size = os.fstat(self._log.fileno()).st_size
        self._tail_bytes = _STACKS_TAIL_BYTES
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_WAIT_S
        while (
            os.fstat(self._log.fileno()).st_size == size
            and time.monotonic() < deadline
            and self.is_alive
        ):
            time.sleep(0.05)
        if self.is_alive:
            time.sleep(0.2)


class Child(ABC):
    def __init__(self, name: str, *, log_path: Path | None, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log_path = log_path
        self._environment = environment
        self._process: LoggedProcess | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self, timeout_s: float = 300.0) -> Self:
        """Raises EngineFailed."""
        if self._process is not None:
            raise EngineFailed(f"{self._name} (pid {self._process.pid}) was started already")
        self._process = self._spawn()
        try:
            self._wait_until_ready(self._process, timeout_s)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self, timeout_s: float = 60.0) -> None:
        """Kill it after `timeout_s`. Idempotent."""
        try:
            if self._process is not None and self._process.is_alive:
                self._ask_to_end(self._process, timeout_s)
                self._process.wait(timeout_s)
        except EngineFailed:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_alive

    def pause(self) -> None:
        """Until `resume`; the kernel still accepts connections."""
        self._running().signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().signal(signal.SIGCONT)

    def log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else ""

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _running(self) -> LoggedProcess:
        if self._process is None:
            raise EngineFailed(f"{self._name} was not started")
        return self._process

    @abstractmethod
    def _spawn(self) -> LoggedProcess: ...

    @abstractmethod
    def _wait_until_ready(self, process: LoggedProcess, timeout_s: float) -> None:
        """Raises EngineFailed."""

    def _ask_to_end(self, process: LoggedProcess, timeout_s: float) -> None:
        process.terminate()


def _descriptor(pipe: IO[bytes] | None) -> int:
    assert pipe is not None, "started without pipes"
    return pipe.fileno()
