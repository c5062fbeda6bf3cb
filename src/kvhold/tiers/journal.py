"""Which clears the tiers still owe, in a small file, so that a restart does not forget them.

    journal = ClearsJournal(Path("/run/user/1000/kvhold/node.sock.clears"))
    await journal.add("redis", prefix)        # on the disk before it returns
    journal.begin(["disk", "redis"])          # at the start, once
    journal.owed("redis")                     # after a restart
    await journal.remove("redis", prefix)     # the tier has been cleared

One line for each clear: the tier's name, a tab, the prefix of the keys in hexadecimal. The file is replaced in one step. It is bounded:
a tier of one host that owes very many clears owes everything (`guard.py`); of a shared tier, what is beyond the bound is not written, and
that is logged. A file that cannot be understood means that every tier owes everything: `begin` makes that a debt of each.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.tiers.files.safe import open_folder, open_own_file

log = logging.getLogger(__name__)

_MOST_OWED = 100_000  # by one tier
_MOST_BYTES = 16 << 20


class ClearsJournal:
    """Of one cache. `owed` is read once at the start; `add` and `remove` may be awaited from one loop."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read or belongs to somebody else."""
        self._path = path
        self._lock = threading.Lock()
        self._all_owe = False
        self._owed: dict[str, dict[bytes, None]] = {}
        try:
            text = self._read()
        except OSError as error:
            raise ConfigError(f"{path}: the clears that tiers owe cannot be read: {error.strerror}") from None
        try:
            for line in text.splitlines():
                name, prefix = line.split("\t")
                if len(prefix) not in (0, 2 * NAMESPACE_BYTES):
                    raise ValueError(line)
                self._owed.setdefault(name, {})[bytes.fromhex(prefix)] = None
        except ValueError:
            log.warning("%s cannot be understood: every tier is cleared", path)
            self._all_owe = True

    def begin(self, tiers: Sequence[str]) -> None:
        """Where the file could not be understood: each of these tiers owes everything, and the file says so."""
        if self._all_owe:
            self._all_owe = False
            with self._lock:
                self._owed = {tier: {b"": None} for tier in tiers}
                self._save()

    def owed(self, tier: str) -> list[bytes]:
        """The prefixes of the keys that are to be removed from a tier."""
        return list(self._owed.get(tier, ()))

    async def add(self, tier: str, prefix: bytes) -> None:
        """A tier owes a clear. It is on the disk when this returns; a fault is logged, since the clear itself must go on."""
        await asyncio.to_thread(self._change, tier, prefix, owed=True)

    async def remove(self, tier: str, prefix: bytes) -> None:
        """A tier has been cleared."""
        await asyncio.to_thread(self._change, tier, prefix, owed=False)

    def _change(self, tier: str, prefix: bytes, *, owed: bool) -> None:
        with self._lock:
            prefixes = self._owed.setdefault(tier, {})
            if not owed:
                prefixes.pop(prefix, None)
            elif not prefix:
                self._owed[tier] = {b"": None}
            elif prefix not in prefixes and len(prefixes) >= _MOST_OWED:
                log.error("%s: tier %s owes %d clears; a restart of the node would forget one more", self._path, tier, len(prefixes))
            else:
                prefixes[prefix] = None
            self._save()

    def _save(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.error("%s: a clear would not survive a restart of the node: %s", self._path, error)

    def _read(self) -> str:
        try:
            folder = open_folder(self._path.parent)
            try:
                file = open_own_file(self._path.name, os.O_RDONLY, dir_fd=folder, shown=str(self._path))
            finally:
                os.close(folder)
        except FileNotFoundError:
            return ""
        with os.fdopen(file, "rb") as opened:
            return opened.read(_MOST_BYTES).decode(errors="replace")

    def _write(self) -> None:
        lines = [f"{tier}\t{prefix.hex()}\n" for tier, prefixes in self._owed.items() for prefix in prefixes]
        folder = open_folder(self._path.parent)
        try:
            temporary = f"{self._path.name}.new"
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            file = open_own_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder, shown=f"{self._path}.new")
            with os.fdopen(file, "wb") as opened:
                opened.write("".join(lines).encode())
                opened.flush()
                os.fsync(opened.fileno())
            os.rename(temporary, self._path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)
