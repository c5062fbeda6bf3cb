"""Cores and NUMA nodes of threads and memory. Linux only. Any thread."""

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvhold.memory.arena import Region

log = logging.getLogger(__name__)

OWN_PREFIX = "kvhold"

_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
_MAX_NUMA_NODES = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236, "ppc64le": 260, "s390x": 269}
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def parse_list(text: str) -> list[int]:
    """ "0-3,8", of numbers below 65536. Raises ValueError."""
    numbers: set[int] = set()
    for item in text.strip().split(",") if text.strip() else []:
        first, dash, last = item.strip().partition("-")
        begin, end = int(first), int(last if dash else first)
        if not 0 <= begin <= end < 1 << 16:
            raise ValueError(f"{item!r} is no range of numbers such as 0-3")
        numbers.update(range(begin, end + 1))
    return sorted(numbers)


def format_list(numbers: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def take_all_cores(thread: int = 0) -> set[int]:
    """All cores of its control group, which are returned. thread: 0: the caller"""
    with suppress(OSError):
        os.sched_setaffinity(thread, _possible_cores())
    return os.sched_getaffinity(thread)


def memory_nodes() -> list[int]:
    """For this process; empty: unknown."""
    try:
        with_memory = set(parse_list((_NODES / "has_memory").read_text()))
        status = Path("/proc/self/status").read_text().splitlines()
        allowed = next(
            line.split(":", 1)[1] for line in status if line.startswith("Mems_allowed_list:")
        )
        return sorted(with_memory & set(parse_list(allowed)))
    except (OSError, ValueError, StopIteration):
        return []


def engine_memory_nodes() -> list[int]:
    mode, mask = ctypes.c_int(), _mask_of([])
    if (
        system_call(
            _GET_MEMPOLICY, "get_mempolicy", ctypes.byref(mode), mask, _MAX_NUMA_NODES, None, 0
        )
        and mode.value != _MPOL_DEFAULT
    ):
        bound = [
            node
            for node in range(_MAX_NUMA_NODES)
            if mask[node // _WORD_BITS] >> (node % _WORD_BITS) & 1
        ]
        if bound:
            return bound
    return sorted(_nodes_of(os.sched_getaffinity(0)) & set(memory_nodes()))


def set_default_memory_policy() -> bool:
    """New pages near their first writer. False: the host refuses."""
    return system_call(_SET_MEMPOLICY, "set_mempolicy", _MPOL_DEFAULT, None, 0)


def interleave(regions: Iterable[Region], nodes: Sequence[int]) -> bool:
    """False: the host refuses. regions: whole pages."""
    mask = _mask_of(nodes)
    spread = [
        system_call(
            _MBIND, "mbind", r.address, r.nbytes, _MPOL_INTERLEAVE, mask, _MAX_NUMA_NODES, 0
        )
        for r in regions
    ]
    return all(spread)


def system_call(numbers: Mapping[str, int], name: str, *arguments: Any) -> bool:
    number = numbers.get(platform.machine())
    if number is None:
        return False
    given = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if _libc.syscall(ctypes.c_long(number), *given) != 0:
        log.debug("%s: %s", name, os.strerror(ctypes.get_errno()))
        return False
    return True


def spun_cores(environ: Mapping[str, str] = os.environ) -> set[int]:
    own = {
        thread.native_id for thread in threading.enumerate() if thread.name.startswith(OWN_PREFIX)
    }
    bound = {
        core
        for native_id, cores in _masks()
        if native_id not in own and len(cores) == 1
        for core in cores
    }
    return bound | _openmp_cores(environ)


def place_own_threads(cores: str = "") -> None:
    """If the engine binds threads, move kvhold's off its cores, but near its memory.

    cores: a list such as "8-15"; "inherit": change nothing
    """
    if cores == "inherit":
        return
    spun = spun_cores()
    for thread in threading.enumerate():
        if thread.name.startswith(OWN_PREFIX) and thread.native_id is not None:
            _label(thread.native_id, thread.name)
            _place(thread.native_id, cores, spun)


def place_this_thread(cores: str = "") -> None:
    native_id = threading.get_native_id()
    _label(native_id, threading.current_thread().name)
    if cores != "inherit":
        _place(native_id, cores, spun_cores())


def _label(native_id: int, name: str) -> None:
    with suppress(OSError):
        (_TASKS / str(native_id) / "comm").write_text(name)


def _place(native_id: int, cores: str, spun: set[int]) -> None:
    try:
        if cores:
            os.sched_setaffinity(native_id, parse_list(cores))
        elif spun:
            os.sched_setaffinity(native_id, _free_cores(take_all_cores(native_id), spun))
    except OSError as error:
        log.debug("thread %d stays on its cores: %s", native_id, error)


def _free_cores(allowed: set[int], spun: set[int]) -> set[int]:
    """Prefers cores near the spinning threads."""
    free = allowed - spun
    near = {core for core in free if _nodes_of([core]) & _nodes_of(spun)}
    return near or free or allowed


def _possible_cores() -> list[int]:
    try:
        return parse_list((_CPUS / "possible").read_text())
    except (OSError, ValueError):
        return list(range(os.cpu_count() or 1))


def _nodes_of(cores: Iterable[int]) -> set[int]:
    return {
        int(folder.name[4:])
        for core in cores
        for folder in (_CPUS / f"cpu{core}").glob("node[0-9]*")
    }


def _masks() -> Iterator[tuple[int, set[int]]]:
    for task in _TASKS.iterdir():
        with suppress(OSError, ValueError):
            yield int(task.name), os.sched_getaffinity(int(task.name))


def _openmp_cores(environ: Mapping[str, str]) -> set[int]:
    texts = []
    if "GOMP_CPU_AFFINITY" in environ:
        texts = environ["GOMP_CPU_AFFINITY"].replace(",", " ").split()
    elif "proclist=[" in environ.get("KMP_AFFINITY", ""):
        texts = environ["KMP_AFFINITY"].split("proclist=[", 1)[1].split("]", 1)[0].split(",")
    elif environ.get("OMP_PROC_BIND", "false").lower() != "false" and "{" in environ.get(
        "OMP_PLACES", ""
    ):
        texts = environ["OMP_PLACES"].replace("{", "").replace("}", "").split(",")
    try:
        return {core for text in texts for core in parse_list(text)}
    except ValueError:
        return set()


def _mask_of(nodes: Sequence[int]) -> "ctypes.Array[ctypes.c_ulong]":
    mask = (ctypes.c_ulong * (_MAX_NUMA_NODES // _WORD_BITS))()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << (node % _WORD_BITS)
    return mask
