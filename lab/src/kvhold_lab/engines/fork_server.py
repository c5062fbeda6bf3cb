"""A process that has imported vLLM, which takes ten seconds, and forks engines.

    python -m kvhold_lab.engines.fork_server DESCRIPTOR

The end of its socket ends the server; children live on.
"""

import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import msgspec

_MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "compressed_tensors",
    "kvhold.integrations.vllm",
)
MOST_REQUEST_BYTES = 1 << 16
READY = b"ready"


class Fork(msgspec.Struct, frozen=True):
    module: str
    environment: dict[str, str]
    folder: str
    cores: list[int]


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for module in _MODULES:
        importlib.import_module(module)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        print("what was imported has started threads, and those do not survive a fork")
        return 1
    gc.collect()
    gc.freeze()
    control.sendall(READY)
    _Server(control).run()
    return 0


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ends: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
            if self._control in ready and not self._answer():
                return

    def _answer(self) -> bool:
        request, descriptors, _, _ = socket.recv_fds(self._control, MOST_REQUEST_BYTES, 4)
        if not request:
            return False
        fork = msgspec.json.decode(request, type=Fork)
        *streams, end = descriptors
        child = os.fork()
        if child == 0:
            self._forget()
            os.close(end)
            os._exit(_run(fork, streams))
        os.setpgid(child, child)
        self._ends[child] = end
        for descriptor in streams:
            os.close(descriptor)
        self._control.sendall(str(child).encode())
        return True

    def _reap(self) -> None:
        for child in list(self._ends):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                end = self._ends.pop(child)
                with contextlib.suppress(BrokenPipeError):
                    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(end)

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._selector, self._control, self._woken, self._wakes):
            end.close()
        for descriptor in self._ends.values():
            os.close(descriptor)


def _run(fork: Fork, streams: list[int]) -> int:
    """Return the exit code, after all threads."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(fork.environment)
    os.chdir(fork.folder)
    os.sched_setaffinity(0, fork.cores)
    sys.argv = [fork.module]
    code = 0
    try:
        runpy.run_module(fork.module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does for its children
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
