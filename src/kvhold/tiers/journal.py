"""A small file with the pending clears, replaced in one step. Its lines, with tabs between fields:

- a clear: the tier's place, the keys' prefix in hex, or a chunk's last key (`chunk_clears.py`)
- a removal from a shared tier: "!" and the tier's place, the keys' prefix in hex
- a generation: the tier's place, the namespace in hex, the number
- a place of the last start: "=" and the place
- a folder: "@" and its identity (`disk/folder.py`), the tier's place
- a clear that ended without a folder: the folder's line, the prefix in hex

Such a clear is pending again when the folder is back. A new place gets the pending clears of all
removed places: it may be one of these.

Beyond the bounds, a private tier gets one clear of everything; clears of a shared tier are only
logged. An invalid file gives every tier a clear of everything.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvhold.core.errors import ConfigError
from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.tiers.files.safe import open_folder, open_own_file, replace_own_file

log = logging.getLogger(__name__)

_MOST_JOURNALED = 100_000
_MOST_REACHED = 20_000
_MOST_FOLDERS = 64  # absent folders of a tier; the one opened longest ago is forgotten
_MOST_MISSED = 1000  # clears of a folder; more become one clear of everything
_MOST_BYTES = 16 << 20
_DIGITS = (0, 2 * NAMESPACE_BYTES, 2 * KEY_BYTES)  # of a cleared prefix


class ClearsJournal:
    """Await `add`, `remove` and `reach` from one loop."""

    def __init__(self, path: Path, *, any_owner: bool = False) -> None:
        """Raises ConfigError if the file cannot be read or belongs to another user."""
        self._path = path
        self._any_owner = any_owner
        self._lock = threading.Lock()
        self._is_closed = False
        self._all_owe = False
        self._pending: dict[str, dict[bytes, None]] = {}
        self._removals: dict[str, dict[bytes, None]] = {}
        self._reached: dict[str, dict[bytes, int]] = {}
        self._last_places: set[str] = set()
        # tier -> identity of a folder -> clears that it missed
        self._folders: dict[str, dict[str, dict[bytes, None]]] = {}
        self._present: dict[str, dict[str, str]] = {}
        try:
            text = self._read()
        except OSError as error:
            raise ConfigError(
                f"{path}: the pending clears cannot be read: {error.strerror}"
            ) from None
        try:
            for line in text.splitlines():
                if line.startswith("="):
                    self._last_places.add(line[1:])
                    continue
                if line.startswith("@"):
                    self._read_folder(line[1:])
                    continue
                name, prefix, *numbers = line.split("\t")
                if len(prefix) not in _DIGITS or len(numbers) > 1:
                    raise ValueError(line)
                if name.startswith("!"):
                    self._removals.setdefault(name[1:], {})[bytes.fromhex(prefix)] = None
                elif numbers:
                    self._reached.setdefault(name, {})[bytes.fromhex(prefix)] = int(numbers[0])
                else:
                    self._pending.setdefault(name, {})[bytes.fromhex(prefix)] = None
        except ValueError:
            log.warning("%s cannot be understood: every tier is cleared", path)
            self._all_owe = True

    def begin(self, tiers: Sequence[str]) -> None:
        with self._lock:
            if self._all_owe:
                self._all_owe = False
                self._pending = {tier: {b"": None} for tier in tiers}
                self._reached = {}
                self._removals = {}
                self._folders = {}
            else:
                gone = [
                    prefix
                    for tier, prefixes in self._pending.items()
                    if tier not in tiers
                    for prefix in prefixes
                ]
                gone_folders = [self._folders[tier] for tier in set(self._folders) - set(tiers)]
                new_places = set(tiers) - self._last_places
                if new_places:
                    self._folders = {
                        tier: of for tier, of in self._folders.items() if tier in tiers
                    }
                for tier in new_places:
                    together = self._pending.get(tier, {}) | dict.fromkeys(gone)
                    if together:
                        fits = len(together) <= _MOST_JOURNALED
                        self._pending[tier] = together if fits else {b"": None}
                    for folders in gone_folders:
                        for identity, missed in folders.items():
                            self._miss(tier, identity, missed)
            self._removals = {tier: of for tier, of in self._removals.items() if tier in tiers}
            had_file = bool(self._pending or self._reached or self._last_places or self._folders)
            self._last_places = set(tiers)
            if had_file:
                self._save()

    def pending(self, tier: str) -> list[bytes]:
        return [prefix for prefix in self._pending.get(tier, ()) if len(prefix) < KEY_BYTES]

    def pending_chunks(self, tier: str) -> list[bytes]:
        return [prefix for prefix in self._pending.get(tier, ()) if len(prefix) == KEY_BYTES]

    async def add(self, tier: str, prefix: bytes) -> None:
        """Then the clear is on the disk. A fault is only logged."""
        await asyncio.to_thread(self._change, tier, [prefix], pending=True)

    async def add_chunks(self, tier: str, last_keys: Sequence[bytes]) -> None:
        await asyncio.to_thread(self._change, tier, last_keys, pending=True)

    async def remove_chunks(self, tier: str, last_keys: Sequence[bytes]) -> None:
        await asyncio.to_thread(self._change, tier, last_keys, pending=False)

    def removals(self, tier: str) -> list[bytes]:
        return list(self._removals.get(tier, ()))

    async def add_removal(self, tier: str, prefix: bytes) -> None:
        await asyncio.to_thread(self._change_removal, tier, prefix, pending=True)

    async def remove_removal(self, tier: str, prefix: bytes) -> None:
        await asyncio.to_thread(self._change_removal, tier, prefix, pending=False)

    def _change_removal(self, tier: str, prefix: bytes, *, pending: bool) -> None:
        with self._lock:
            of_tier = self._removals.setdefault(tier, {})
            if pending:
                of_tier[prefix] = None
            else:
                of_tier.pop(prefix, None)
            self._save()

    def reached(self, tier: str) -> dict[bytes, int]:
        return dict(self._reached.get(tier, {}))

    async def reach(self, numbers: Mapping[str, Mapping[bytes, int]]) -> None:
        """The generations of this host's chunks: tier -> namespace -> number.

        Call it after `add`: pending clears must cover older generations.
        """
        await asyncio.to_thread(self._reach, numbers)

    def _reach(self, numbers: Mapping[str, Mapping[bytes, int]]) -> None:
        with self._lock:
            new = {
                tier: dict(list(of_tier.items())[:_MOST_REACHED])
                for tier, of_tier in numbers.items()
                if of_tier
            }
            if new != self._reached:
                self._reached = new
                self._save()

    def _lines(self) -> list[str]:
        pending = [
            f"{tier}\t{prefix.hex()}\n"
            for tier, prefixes in self._pending.items()
            for prefix in prefixes
        ]
        removals = [
            f"!{tier}\t{prefix.hex()}\n"
            for tier, prefixes in self._removals.items()
            for prefix in prefixes
        ]
        places = [f"={place}\n" for place in sorted(self._last_places)]
        reached = [
            f"{tier}\t{space.hex()}\t{number}\n"
            for tier, of in self._reached.items()
            for space, number in of.items()
        ]
        folders = [
            line
            for tier, of in self._folders.items()
            for identity, missed in of.items()
            for line in (
                f"@{identity}\t{tier}\n",
                *(f"@{identity}\t{tier}\t{prefix.hex()}\n" for prefix in missed),
            )
        ]
        return places + pending + removals + reached + folders

    async def meet(self, tier: str, path: str, identity: str) -> list[bytes]:
        """The missed clears of the folder at a path, pending again."""
        return await asyncio.to_thread(self._meet, tier, path, identity)

    async def remove(self, tier: str, prefix: bytes) -> None:
        """Folders that are away now have missed the clear."""
        await asyncio.to_thread(self._change, tier, [prefix], pending=False)

    def _change(self, tier: str, prefixes: Sequence[bytes], *, pending: bool) -> None:
        with self._lock:
            for prefix in prefixes:
                if pending:
                    self._add(tier, prefix)
                else:
                    self._pending.setdefault(tier, {}).pop(prefix, None)
            if not pending:
                present = self._present.get(tier, {}).values()
                for identity in self._folders.get(tier, {}):
                    if identity not in present:
                        self._miss(tier, identity, prefixes)
            self._save()

    def _meet(self, tier: str, path: str, identity: str) -> list[bytes]:
        with self._lock:
            self._present.setdefault(tier, {})[path] = identity
            folders = self._folders.setdefault(tier, {})
            is_new, missed = identity not in folders, folders.pop(identity, {})
            folders[identity] = {}
            away = [each for each in folders if each not in self._present[tier].values()]
            for each in away[: max(0, len(away) - _MOST_FOLDERS)]:
                del folders[each]
            for prefix in missed:
                self._add(tier, prefix)
            if is_new or missed:
                self._save()
            return list(missed)

    def _miss(self, tier: str, identity: str, prefixes: Iterable[bytes]) -> None:
        folders = self._folders.setdefault(tier, {})
        missed = folders.get(identity, {}) | dict.fromkeys(prefixes)
        is_everything = b"" in missed or len(missed) > _MOST_MISSED
        folders[identity] = {b"": None} if is_everything else missed

    def _read_folder(self, line: str) -> None:
        identity, tier, *missed = line.split("\t")
        if len(missed) > 1 or any(len(each) not in _DIGITS for each in missed):
            raise ValueError(line)
        self._miss(tier, identity, [bytes.fromhex(each) for each in missed])

    def _add(self, tier: str, prefix: bytes) -> None:
        prefixes = self._pending.setdefault(tier, {})
        if not prefix:
            self._pending[tier] = {b"": None}
        elif prefix not in prefixes and len(prefixes) >= _MOST_JOURNALED:
            log.error(
                "%s: tier %s has %d pending clears; a restart of the node would forget one more",
                self._path,
                tier,
                len(prefixes),
            )
        else:
            prefixes[prefix] = None

    async def close(self, timeout_s: float) -> None:
        """Then nothing is written: the next node may use the file."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._close))
        await asyncio.wait((closing,), timeout=timeout_s)
        self._is_closed = True

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True

    def _save(self) -> None:
        if self._is_closed:
            return
        try:
            self._write()
        except OSError as error:
            log.error("%s: a clear would not survive a restart of the node: %s", self._path, error)

    def _read(self) -> str:
        try:
            folder = open_folder(self._path.parent, any_owner=self._any_owner)
            try:
                file = open_own_file(
                    self._path.name, os.O_RDONLY, dir_fd=folder, shown=str(self._path)
                )
            finally:
                os.close(folder)
        except FileNotFoundError:
            return ""
        with os.fdopen(file, "rb") as opened:
            text = opened.read(_MOST_BYTES + 1).decode(errors="replace")
        return text if len(text) <= _MOST_BYTES else "\tcut"  # a cut file would lose clears

    def _write(self) -> None:
        replace_own_file(
            self._path,
            ["".join(self._lines()).encode()],
            any_owner=self._any_owner,
            is_wanted=lambda: not self._is_closed,
        )
