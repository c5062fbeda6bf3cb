"""Runs pytest in forks of this process, which has imported what takes long, but not kvhold.

    python -m tests.memory.forked_pytest

Reads a line of JSON for each run: `arguments` for pytest, the folder `source` of kvhold, and the
file `output`. Writes pytest's exit status.
"""

import importlib
import json
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

_MODULES = ("hypothesis.stateful", "numba", "torch", "vllm.v1.core.sched.scheduler")


def main() -> int:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork has one thread
    for module in _MODULES:
        if find_spec(module.split(".")[0]) is not None:
            importlib.import_module(module)
    if "kvhold" in sys.modules or len(list(Path("/proc/self/task").iterdir())) > 1:
        print("kvhold is imported, or there are threads, which do not survive a fork")
        return 1
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(asked["arguments"], asked["source"], asked["output"]))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


def _run(arguments: list[str], source: str, output: str) -> int:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = source
    code = int(pytest.main(arguments))
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a process
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
