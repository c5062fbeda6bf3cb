"""Lists of cores, the cores that an engine spins on, and where kvhold's threads go."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhold.memory import placement
from kvhold.memory.arena import Arena

CORES = os.sched_getaffinity(0)
several_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is one core")


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("3", [3]), ("0-3,8", [0, 1, 2, 3, 8]), ("5,4,4-6", [4, 5, 6])]
)
def test_reads_and_writes_lists_as_linux_does(text: str, numbers: list[int]) -> None:
    assert placement.parse_list(text) == numbers
    assert placement.parse_list(placement.format_list(numbers)) == numbers


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "1-", "0-99999999999", "1:2"])
def test_refuses_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        placement.parse_list(text)


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({"GOMP_CPU_AFFINITY": "0 2 5-6"}, {0, 2, 5, 6}),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[1,3]"}, {1, 3}),
        ({"OMP_PLACES": "{1,2}", "OMP_PROC_BIND": "true"}, {1, 2}),
        ({"OMP_PLACES": "{1,2}", "OMP_PROC_BIND": "false"}, set()),
        ({"OMP_PLACES": "{0:4:2}", "OMP_PROC_BIND": "true"}, set()),
        ({"OMP_PLACES": "cores", "OMP_PROC_BIND": "close"}, set()),
        ({}, set()),
    ],
)
def test_openmp_settings_name_the_cores_that_an_engine_spins_on(
    environ: dict[str, str], cores: set[int]
) -> None:
    assert placement.spun_cores(environ) == cores


@contextmanager
def idle_thread(name: str, cores: set[int]) -> Iterator[threading.Thread]:
    """A thread that waits, on these cores."""
    ready, leave = threading.Event(), threading.Event()

    def wait() -> None:
        os.sched_setaffinity(0, cores)
        ready.set()
        leave.wait()

    thread = threading.Thread(target=wait, name=name)
    thread.start()
    ready.wait()
    try:
        yield thread
    finally:
        leave.set()
        thread.join()


def cores_of(thread: threading.Thread) -> set[int]:
    assert thread.native_id is not None
    return os.sched_getaffinity(thread.native_id)


@several_cores
def test_own_threads_leave_the_cores_that_the_engine_binds_its_threads_to() -> None:
    core = min(CORES)
    with idle_thread("engine", {core}) as engine, idle_thread("kvhold-load", {core}) as own:
        placement.place_own_threads()
        assert cores_of(engine) == {core}
        assert core not in cores_of(own)
        placement.place_own_threads(str(core))
        assert cores_of(own) == {core}


@several_cores
def test_own_threads_use_all_cores_where_the_engine_spins_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_CPU_AFFINITY", " ".join(map(str, range(os.cpu_count() or 1))))
    with idle_thread("kvhold-load", {min(CORES)}) as own:
        placement.place_own_threads()
        assert cores_of(own) >= CORES


@several_cores
@pytest.mark.parametrize("setting", ["", "inherit"])
def test_own_threads_stay_where_they_are_beside_an_engine_that_binds_none(setting: str) -> None:
    with idle_thread("kvhold-load", {min(CORES)}) as own:
        placement.place_own_threads(setting)
        assert cores_of(own) == {min(CORES)}


@pytest.mark.skipif(
    not placement.memory_nodes(), reason="Linux does not say which NUMA nodes have memory"
)
def test_an_arena_that_is_spread_says_so_in_every_process_that_maps_it() -> None:
    nodes = placement.memory_nodes()
    with (
        Arena.create(4 << 20, huge_pages="never") as arena,
        Arena.attach(os.dup(arena.fd), arena.nbytes, writable=True) as other,
    ):
        assert placement.interleave(arena.regions, nodes)
        arena.buffer[0] = other.buffer[1] = 1
        starts = {region.address for mapped in (arena, other) for region in mapped.regions}
        lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
        # other tests' arenas may still be mapped
        policies = [policy for address, policy, *_ in lines if int(address, 16) in starts]
        assert policies == [f"interleave:{placement.format_list(nodes)}"] * 2
