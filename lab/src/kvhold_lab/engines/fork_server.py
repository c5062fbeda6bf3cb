"""Imports vLLM, which takes ten seconds, and forks engines.

    python -m kvhold_lab.engines.fork_server DESCRIPTOR OWNER

DESCRIPTOR is a listening socket. The server ends with the lock of the file OWNER.
"""

import contextlib
import fcntl
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
from multiprocessing import util
from pathlib import Path

import msgspec

from kvhold_lab.engines.forked_children import fork_children

_MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "compressed_tensors",
    "kvhold.integrations.vllm",
)
_STARTS_OTHERS = ("vllm.entrypoints.openai.api_server", "kvhold_lab.verify.engine_child")
MOST_REQUEST_BYTES = 1 << 16
READY = b"ready"
_LOOK_S = 2.0


class Fork(msgspec.Struct, frozen=True):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]


def main() -> int:
    listening = socket.socket(fileno=int(sys.argv[1]))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for module in _MODULES:
        importlib.import_module(module)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        print("what was imported has started threads, and those do not survive a fork")
        return 1
    gc.collect()
    gc.freeze()
    _Server(listening, Path(sys.argv[2])).run()
    return 0


def is_owned(owner: Path) -> bool:
    try:
        with owner.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


class _Server:
    def __init__(self, listening: socket.socket, owner: Path) -> None:
        self._listening = listening
        self._owner = owner
        self._clients: set[socket.socket] = set()
        self._ends: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while is_owned(self._owner):
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._reap()
                elif key.fileobj is self._listening:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._answer(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError):
            client.sendall(READY)

    def _answer(self, client: socket.socket) -> None:
        request, descriptors = b"", list[int]()
        with contextlib.suppress(ConnectionResetError):
            request, descriptors, _, _ = socket.recv_fds(client, MOST_REQUEST_BYTES, 4)
        if not request:
            self._selector.unregister(client)
            self._clients.remove(client)
            client.close()
            return
        fork = msgspec.json.decode(request, type=Fork)
        *streams, end = descriptors
        child = os.fork()
        if child == 0:
            self._forget()
            os.close(end)
            os._exit(_run(fork, streams, self._owner.parent))
        with contextlib.suppress(ProcessLookupError):
            os.setpgid(child, child)
        self._ends[child] = end
        for descriptor in streams:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            client.sendall(str(child).encode())

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
        self._selector.close()
        for end in (self._listening, self._woken, self._wakes, *self._clients):
            end.close()
        for descriptor in self._ends.values():
            os.close(descriptor)


def _run(fork: Fork, streams: list[int], folder: Path) -> int:
    """Return the exit code, after all threads."""
    os.setpgid(0, 0)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(fork.environment)
    os.chdir(fork.folder)
    os.sched_setaffinity(0, fork.cores)
    sys.argv = [fork.module, *fork.arguments]
    sys.path.insert(0, fork.folder)
    if fork.module in _STARTS_OTHERS:
        fork_children(folder)
    code = 0
    try:
        runpy.run_module(fork.module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does for its children
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
