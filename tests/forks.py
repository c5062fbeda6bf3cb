"""`python -m kvhold` as a fork of a process that has imported it: most of a short run is imports.

    with forking(): subprocess.Popen([sys.executable, "-m", "kvhold", "status"])

A fork is a child of this process. Its command line is that of the other process, so a test that
reads one takes the fixture `executed`.

    python -m tests.forks DESCRIPTOR   # the other process; ends with the socket
"""

import ctypes
import inspect
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_MODULES = ("kvhold", "tests.tiers.test_disk_crash_writer")
_MOST_REQUEST_BYTES = 1 << 17
_SET_CHILD_SUBREAPER = 36  # of prctl
_EARLY = ("PYTHON", "NUMBA_", "OMP_", "OPENBLAS_", "LD_")  # read by Python, or at an import
_USUAL = {
    "preexec_fn": None,
    "executable": None,
    "pass_fds": (),
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

_execute: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_execute)


@contextmanager
def forking(*, allowed: bool = True) -> Iterator[None]:
    """Fork in this process, or not. Also in subclasses of `Popen`, which are made at imports."""
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _fork if allowed else _execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]


@cache
def the_forks() -> "_Forks":
    """Start the other process, if it does not run yet."""
    return _Forks()


def _fork(process: Any, *given: Any) -> None:
    asked = _signature.bind(process, *given).arguments
    environ = dict(os.environ if asked["env"] is None else asked["env"])
    command = asked["args"]
    if (
        isinstance(command, str | bytes | os.PathLike)
        or list(command[:2]) != [sys.executable, "-m"]
        or command[2] not in _MODULES
        or any(asked[name] != usual for name, usual in _USUAL.items())
        or _early(environ) != _early(os.environ)
    ):
        _execute(process, *given)
        return
    request = {
        "arguments": list(map(str, command[2:])),
        "environ": environ,
        "folder": str(Path(asked["cwd"] or ".").absolute()),
        "cores": sorted(os.sched_getaffinity(0)),
        "new_session": asked["start_new_session"],
    }
    streams = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    process.pid = the_forks().fork(
        request, [ours if given == -1 else given for ours, given in enumerate(streams)]
    )
    process._child_created = True
    process._close_pipe_fds(*(asked[name] for name in _PIPES))


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_EARLY)}


def _without_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Nor with coverage's, which a fork starts itself."""
    kept = {name: value for name, value in environ.items() if "COVERAGE" not in name}
    return kept | {"OPENBLAS_NUM_THREADS": "1"}


class _Forks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=_ROOT,
                env=_without_threads(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the process id."""
        with self._lock:
            self._prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that it becomes our child
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], streams)
                return int(self._control.recv(16))
            finally:
                self._prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    while True:
        request, streams, _, _ = socket.recv_fds(control, _MOST_REQUEST_BYTES, 3)
        if not request:
            return
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.write(tells, str(os.getpid()).encode())
            for descriptor in (told, tells, control.detach()):
                os.close(descriptor)
            _run(streams, **json.loads(request))
            return
        os.waitpid(between, 0)
        control.send(os.read(told, 16))
        for descriptor in (told, tells, *streams):
            os.close(descriptor)


def _import_all() -> None:
    import_module("kvhold.control.server")
    for module in pkgutil.iter_modules(import_module("kvhold.cli").__path__, "kvhold.cli."):
        import_module(module.name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"


def _run(
    streams: list[int],
    *,
    arguments: list[str],
    environ: dict[str, str],
    folder: str,
    cores: list[int],
    new_session: bool,
) -> None:
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in streams:
        os.close(descriptor)
    _reopen_streams()
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    if "COVERAGE_PROCESS_CONFIG" in environ:
        import_module("coverage").process_startup()
    sys.argv, sys.path[0] = arguments, folder
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _reopen_streams() -> None:
    """Those of the other process remember whether its files could seek."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old: Any = getattr(sys, name)
        new: Any = open(  # noqa: SIM115
            number, old.mode, encoding=old.encoding, errors=old.errors, closefd=False
        )
        if number:
            new.reconfigure(
                write_through=old.write_through,
                line_buffering=old.line_buffering or new.line_buffering,
            )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


if __name__ == "__main__":
    main()
