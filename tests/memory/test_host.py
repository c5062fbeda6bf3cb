"""What the host can give, read from files of the kernel: here from a copy that the test writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvhold.memory import host
from kvhold.memory.arena import default_arena_bytes
from kvhold.memory.host import HUGE_PAGE_BYTES, available_bytes, free_huge_pages

GIB = 1 << 30


class Kernel:
    """Files as the kernel shows them, below a folder of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "meminfo",
            "MemTotal:       65536000 kB\nMemFree:        1000 kB\nMemAvailable:   33554432 kB\n",
        )
        self.write("self-cgroup", "0::/a/b/c\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, name: str, limit: str, used: int, inactive_file: int = 0) -> None:
        """One control group (version 2)."""
        self.write(f"groups/{name}/memory.max", f"{limit}\n")
        self.write(f"groups/{name}/memory.current", f"{used}\n")
        self.write(
            f"groups/{name}/memory.stat",
            f"anon 1\nfile 2\nactive_file 3\ninactive_file {inactive_file}\nslab 4\n",
        )


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    names = {
        "_MEMINFO": "meminfo",
        "_OWN_GROUP": "self-cgroup",
        "_GROUPS": "groups",
        "_HUGE": "huge",
    }
    for constant, name in names.items():
        monkeypatch.setattr(host, constant, tmp_path / name)
    return Kernel(tmp_path)


class TestAvailableBytes:
    def test_without_a_control_group_it_is_what_the_kernel_says(self, kernel: Kernel) -> None:
        assert available_bytes() == 32 * GIB

    @pytest.mark.parametrize(
        "text", ["", "9:memory:/x\n", "1:name=systemd:/\n0::/\n", "0::/../elsewhere\n"]
    )
    def test_control_groups_that_are_not_to_be_seen_limit_nothing(
        self, kernel: Kernel, text: str
    ) -> None:
        kernel.write("self-cgroup", text)
        assert available_bytes() == 32 * GIB

    def test_without_the_file_of_the_own_group_nothing_limits(self, kernel: Kernel) -> None:
        (kernel.root / "self-cgroup").unlink()
        assert available_bytes() == 32 * GIB

    def test_a_limited_group_leaves_what_it_does_not_use(self, kernel: Kernel) -> None:
        kernel.group("a/b/c", str(10 * GIB), used=4 * GIB)
        assert available_bytes() == 6 * GIB

    def test_a_limit_beyond_the_host_gives_no_more_than_the_host_has(self, kernel: Kernel) -> None:
        kernel.group("a/b/c", str(100 * GIB), used=0)
        assert available_bytes() == 32 * GIB

    def test_a_group_without_a_limit_limits_nothing(self, kernel: Kernel) -> None:
        kernel.group("a/b/c", "max", used=31 * GIB)
        assert available_bytes() == 32 * GIB

    def test_a_limit_further_up_counts(self, kernel: Kernel) -> None:
        kernel.group("a/b/c", "max", used=GIB)
        kernel.group("a/b", str(20 * GIB), used=GIB)
        kernel.group("a", str(8 * GIB), used=3 * GIB)
        assert available_bytes() == 5 * GIB

    def test_in_a_container_the_group_is_the_root_that_it_sees(self, kernel: Kernel) -> None:
        kernel.write("self-cgroup", "0::/\n")
        kernel.group("", str(3 * GIB), used=GIB)
        assert available_bytes() == 2 * GIB

    def test_file_pages_that_the_kernel_can_drop_are_free(self, kernel: Kernel) -> None:
        """A model that was just read from disk fills a container to its limit, and is no reason to
        refuse an arena.
        """
        kernel.group("a/b/c", str(10 * GIB), used=10 * GIB, inactive_file=7 * GIB)
        assert available_bytes() == 7 * GIB

    def test_a_group_over_its_limit_has_nothing(self, kernel: Kernel) -> None:
        kernel.group("a/b/c", str(10 * GIB), used=11 * GIB)
        assert available_bytes() == 0

    def test_a_host_that_says_nothing_is_an_error(self, kernel: Kernel) -> None:
        kernel.write("meminfo", "MemTotal: 5 kB\n")
        with pytest.raises(OSError, match="has no MemAvailable"):
            available_bytes()

    def test_this_host_has_memory(self) -> None:
        assert available_bytes() > 0


class TestFreeHugePages:
    def test_pages_promised_to_others_are_not_free(self, kernel: Kernel) -> None:
        kernel.write("huge/free_hugepages", "12\n")
        kernel.write("huge/resv_hugepages", "5\n")
        assert free_huge_pages() == 7

    @pytest.mark.parametrize("text", [None, "", "none"])
    def test_a_host_without_them_has_none(self, kernel: Kernel, text: str | None) -> None:
        if text is not None:
            kernel.write("huge/free_hugepages", text)
        assert free_huge_pages() == 0


class TestDefaultArenaBytes:
    @pytest.mark.parametrize(
        ("free", "arena"),
        [(32 * GIB, 4 * GIB), (16 * GIB, 4 * GIB), (8 * GIB, 2 * GIB), (0, HUGE_PAGE_BYTES)],
    )
    def test_a_quarter_of_what_is_free_and_at_most_four_gib(
        self, kernel: Kernel, free: int, arena: int
    ) -> None:
        kernel.write("meminfo", f"MemAvailable: {free // 1024} kB\n")
        assert default_arena_bytes() == arena


_MEASURED = """
import time
from kvhold.memory.arena import Arena
from kvhold.memory.host import resident_bytes

before = resident_bytes()
assert before > 0
with Arena.create(64 << 20, huge_pages="never") as arena:
    arena.view(0, 64 << 20)[:] = bytes(64 << 20)
    assert resident_bytes() < before + (32 << 20)
own = bytearray(b"x") * (64 << 20)
until = time.monotonic() + 10
while resident_bytes() <= before + (32 << 20):  # some kernels count pages a moment later
    assert time.monotonic() < until
    time.sleep(0.01)
"""


class TestResidentBytes:
    def test_own_memory_counts_and_the_arena_does_not(self) -> None:
        """In a process of its own: in this one, memory of other tests may be given back."""
        subprocess.run([sys.executable, "-c", _MEASURED], check=True, timeout=60)
