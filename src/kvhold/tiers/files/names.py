"""File names: unique temporary names across hosts, and the subfolder of a key.

name = temporary_name()  # <host>-<pid namespace>.<pid>.<counter>.<random>
is_leftover(name, age_s=..., stale_s=...)  # whether its writer has ended
shard_of(key)  # "3f"
"""

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
    """Return the key's subfolder, one of 256.

    It is the first byte of the tokens' hash, since many keys share their namespace.
    """
    return key[NAMESPACE_BYTES : NAMESPACE_BYTES + 1].hex()


def temporary_name() -> str:
    """Return a new unique name."""
    return f"{_host()}.{os.getpid()}.{next(_COUNTER)}.{token_hex(_CHANCE_BYTES)}"


def writer_of(name: str) -> tuple[str, int] | None:
    """Return the host and pid in a temporary name; None for a foreign name."""
    fields = name.split(".")
    if (
        len(fields) != 4
        or not (fields[1].isdecimal() and fields[2].isdecimal())
        or len(fields[3]) != 2 * _CHANCE_BYTES
    ):
        return None
    return fields[0], int(fields[1])


def is_leftover(name: str, *, age_s: float, stale_s: float) -> bool:
    """Return whether a temporary file is abandoned.

    Its process on this host has ended, or the file is older than `stale_s`.
    """
    writer = writer_of(name)
    if writer is None:
        return False
    host, pid = writer
    return age_s > stale_s or (host == _host() and not _is_alive(pid))


@cache
def _host() -> str:
    """Return this host's name and its pid namespace, since containers may share a host name."""
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
