import mmap
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_HUGE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
HUGE_PAGE_BYTES = 2 << 20


def available_bytes() -> int:
    """MemAvailable, or the rest of this control group's limit if less."""
    free = _meminfo("MemAvailable")
    group = _group_headroom()
    return free if group is None else min(free, group)


def all_huge_pages() -> int:
    try:
        return int((_HUGE / "nr_hugepages").read_text())
    except (OSError, ValueError):
        return 0


def free_huge_pages() -> int:
    try:
        return int((_HUGE / "free_hugepages").read_text()) - int(
            (_HUGE / "resv_hugepages").read_text()
        )
    except (OSError, ValueError):
        return 0


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


def _meminfo(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} has no {name}")


def _group_headroom() -> int | None:
    try:
        own = next(
            line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return None
    folder = _GROUPS / own.strip("/")
    above = folder.parents[: len(folder.relative_to(_GROUPS).parts)]
    allowed = [
        headroom for group in (folder, *above) if (headroom := _headroom_of(group)) is not None
    ]
    return min(allowed, default=None)


def _headroom_of(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text().split()
    except OSError:
        return None
    if limit == "max":
        return None
    # inactive file pages count as used, but are dropped on demand
    reclaimable = int(stat[stat.index("inactive_file") + 1])
    return max(0, int(limit) - max(0, used - reclaimable))
