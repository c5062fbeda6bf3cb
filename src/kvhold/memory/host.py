"""What this host can give: free memory and huge pages."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_HUGE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
HUGE_PAGE_BYTES = 2 << 20


def available_bytes() -> int:
    """Memory that can be had without swapping: the kernel's MemAvailable, or less if this control group is limited to less."""
    free = _meminfo("MemAvailable")
    group = _group_headroom()
    return free if group is None else min(free, group)


def free_huge_pages() -> int:
    """How many 2 MiB pages the host keeps ready and nobody uses."""
    try:
        return int(_HUGE.read_text())
    except (OSError, ValueError):
        return 0


def resident_bytes() -> int:
    """Memory of this process that is not shared (the arena is)."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * 4096


def _meminfo(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} has no {name}")


def _group_headroom() -> int | None:
    """What the control group (version 2) still allows; None where nothing limits it."""
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / own.strip("/")
        limit = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
    except (OSError, StopIteration):
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
