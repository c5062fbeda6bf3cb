import os
from functools import cache
from itertools import count
from pathlib import Path
from secrets import token_hex
from socket import gethostname

from kvhold.core.keys import NAMESPACE_BYTES

_COUNTER = count()
_CHANCE_BYTES = 8


def shard_of(key: bytes) -> str:
    return key[NAMESPACE_BYTES : NAMESPACE_BYTES + 1].hex()


def temporary_name() -> str:
    """`<host>-<pid namespace>.<pid>.<counter>.<random>`."""
    return f"{_host()}.{os.getpid()}.{next(_COUNTER)}.{token_hex(_CHANCE_BYTES)}"


def writer_of(name: str) -> tuple[str, int] | None:
    fields = name.split(".")
    if (
        len(fields) != 4
        or not (fields[1].isdecimal() and fields[2].isdecimal())
        or len(fields[3]) != 2 * _CHANCE_BYTES
    ):
        return None
    return fields[0], int(fields[1])


def is_leftover(name: str, *, age_s: float, stale_s: float) -> bool:
    """Its process on this host has ended, or it is older than `stale_s`."""
    writer = writer_of(name)
    if writer is None:
        return False
    host, pid = writer
    return age_s > stale_s or (host == _host() and not _is_alive(pid))


@cache
def _host() -> str:
    """With the pid namespace: containers may share a host name."""
    space = Path("/proc/self/ns/pid").stat().st_ino
    return "".join(c if c.isalnum() else "-" for c in gethostname())[:64] + f"-{space}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
