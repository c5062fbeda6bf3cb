"""What engines under measurement have in common."""

import os
import subprocess
import sys

import pytest

from kvhold.lab.bench.engines import alike

# What a large batch of an engine does: 64 MiB are allocated, written and given back, three times; then the page faults of the last time.
ALLOCATES = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    return int(subprocess.run([sys.executable, "-c", ALLOCATES], capture_output=True, text=True, check=True).stdout)


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
