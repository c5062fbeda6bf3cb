"""Which clears the tiers still owe, in a small file, so that a restart does not forget them.

    journal = ClearsJournal(Path("/home/user/.local/state/kvhold/host-0123456789abcdef.clears"))
    await journal.add("redis", prefix)        # on the disk before it returns
    journal.begin(["disk", "redis"])          # at the start, once
    journal.owed("redis")                     # after a restart
    await journal.remove("redis", prefix)     # the tier has been cleared
    await journal.reach({"redis": numbers})   # to which generations belongs what this host holds (`generations.py`)

One line for each clear: the tier's name, a tab, the prefix of the keys in hexadecimal. One for each generation: the same of the
namespace, a tab, its number. The file is replaced in one step. It is bounded:
a tier of one host that owes very many clears owes everything (`guard.py`); of a shared tier, what is beyond the bound is not written, and
that is logged. A file that cannot be understood means that every tier owes everything: `begin` makes that a debt of each.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.tiers.files.safe import open_folder, open_own_file

log = logging.getLogger(__name__)

_MOST_OWED = 100_000  # by one tier
_MOST_REACHED = 20_000  # namespaces of one tier whose generation is remembered
_MOST_BYTES = 16 << 20


class ClearsJournal:
    """Of one cache. `owed` is read once at the start; `add` and `remove` may be awaited from one loop."""

    def __init__(self, path: Path, *, any_owner: bool = False) -> None:
        """any_owner: the folder may belong to others. Raises ConfigError for a file that cannot be read or is not ours."""
        self._path = path
        self._any_owner = any_owner
        self._lock = threading.Lock()
        self._all_owe = False
        self._owed: dict[str, dict[bytes, None]] = {}
        self._reached: dict[str, dict[bytes, int]] = {}
        try:
            text = self._read()
        except OSError as error:
            raise ConfigError(f"{path}: the clears that tiers owe cannot be read: {error.strerror}") from None
        try:
            for line in text.splitlines():
                name, prefix, *numbers = line.split("\t")
                if len(prefix) not in (0, 2 * NAMESPACE_BYTES) or len(numbers) > 1:
                    raise ValueError(line)
                if numbers:
                    self._reached.setdefault(name, {})[bytes.fromhex(prefix)] = int(numbers[0])
                else:
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
                self._reached = {}
                self._save()

    def owed(self, tier: str) -> list[bytes]:
        """The prefixes of the keys that are to be removed from a tier."""
        return list(self._owed.get(tier, ()))

    async def add(self, tier: str, prefix: bytes) -> None:
        """A tier owes a clear. It is on the disk when this returns; a fault is logged, since the clear itself must go on."""
        await asyncio.to_thread(self._change, tier, prefix, owed=True)

    def reached(self, tier: str) -> dict[bytes, int]:
        """Namespace -> the generation in this tier that what this host holds belongs to."""
        return dict(self._reached.get(tier, {}))

    async def reach(self, numbers: Mapping[str, Mapping[bytes, int]]) -> None:
        """What this host holds belongs to these generations now, or is owed: tier -> namespace -> number. Call it after `add`."""
        await asyncio.to_thread(self._reach, numbers)

    def _reach(self, numbers: Mapping[str, Mapping[bytes, int]]) -> None:
        with self._lock:  # those beyond the bound count as 0: after a restart their next clear is learned once more
            new = {tier: dict(list(of_tier.items())[:_MOST_REACHED]) for tier, of_tier in numbers.items() if of_tier}
            if new != self._reached:
                self._reached = new
                self._save()

    def _lines(self) -> list[str]:
        owed = [f"{tier}\t{prefix.hex()}\n" for tier, prefixes in self._owed.items() for prefix in prefixes]
        return owed + [f"{tier}\t{space.hex()}\t{number}\n" for tier, of in self._reached.items() for space, number in of.items()]

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
            folder = open_folder(self._path.parent, any_owner=self._any_owner)
            try:
                file = open_own_file(self._path.name, os.O_RDONLY, dir_fd=folder, shown=str(self._path))
            finally:
                os.close(folder)
        except FileNotFoundError:
            return ""
        with os.fdopen(file, "rb") as opened:
            return opened.read(_MOST_BYTES).decode(errors="replace")

    def _write(self) -> None:
        folder = open_folder(self._path.parent, any_owner=self._any_owner)
        try:
            temporary = f"{self._path.name}.new"
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            file = open_own_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder, shown=f"{self._path}.new")
            with os.fdopen(file, "wb") as opened:
                opened.write("".join(self._lines()).encode())
                opened.flush()
                os.fsync(opened.fileno())
            os.rename(temporary, self._path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)
