"""What engines under measurement have in common."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvhold.testing.cache import a_prompt, fill
from kvhold_lab.bench.engines import alike, flush_engines
from tests.node.nodes import SPACE, RunningNode

# What a large batch of an engine does: 64 MiB are allocated, written and given back, three times;
# then the page faults of the last time.
ALLOCATES = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    return int(
        subprocess.run(
            [sys.executable, "-c", ALLOCATES], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="not glibc's allocator")
def test_what_a_process_has_allocated_it_keeps() -> None:
    with alike():
        kept = faults()
    assert kept < 1_000 < faults(), "of 16,384 pages"


def test_afterwards_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    before = dict(os.environ)
    with alike():
        assert os.environ["MALLOC_MMAP_MAX_"] == "0"
    assert dict(os.environ) == before


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    node = RunningNode(tmp_path / "node.sock")
    yield node
    node.close()


@pytest.mark.server
def test_what_an_engine_still_stores_is_waited_for(node: RunningNode) -> None:
    engine, asker, prompt = node.client(), node.client(), a_prompt(SPACE, 64)
    engine.register(SPACE)
    with ThreadPoolExecutor(1) as pool:
        with engine.reserve(SPACE.layout, prompt.chunks()) as reservation:
            flushed = pool.submit(flush_engines, asker, patience_s=60.0)
            fill(reservation, SPACE.layout, prompt.chunks(), 0)
            with pytest.raises(TimeoutError):
                flushed.result(0.3)
            reservation.commit()
        flushed.result(60)
    assert asker.status()["chunks"] == 4


@pytest.mark.server
def test_not_for_ever(node: RunningNode) -> None:
    engine = node.client()
    engine.register(SPACE)
    with (
        engine.reserve(SPACE.layout, a_prompt(SPACE, 64).chunks()),
        pytest.raises(TimeoutError, match=r"within 0\.2 s"),
    ):
        flush_engines(node.client(), patience_s=0.2)
