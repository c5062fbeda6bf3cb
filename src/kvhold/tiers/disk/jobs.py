"""Jobs of a folder's threads. An OSError becomes `fault`. With `stop` set, a job only cleans up."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event

from kvhold.core.errors import TierError
from kvhold.tiers.base import ValueChanges
from kvhold.tiers.disk.folder import FileLeft, Folder, FoundValue
from kvhold.tiers.disk.index import DiskEntry, Index
from kvhold.tiers.disk.learned import Learning
from kvhold.tiers.files.faults import as_tier_error
from kvhold.tiers.files.pauses import with_pauses

_log = logging.getLogger(__name__)

SERVES_FROM = 20_000


@dataclass(frozen=True)
class StoreSettings:
    max_bytes: int
    reserve_bytes: int
    policy: str
    direct: str
    sync: bool
    io_threads: int
    any_owner: bool
    learning: Learning | None = None
    changes: ValueChanges | None = None


class Open:
    def __init__(self, path: str, settings: StoreSettings) -> None:
        self._path = path
        self._settings = settings
        self.folder: Folder | None = None
        self.index: Index | None = None
        self.last_ns = 0
        self.began_ns = time.time_ns()
        self.rest: Iterator[list[FoundValue]] | None = None
        self.fault: TierError | None = None

    def run(self, stop: Event) -> None:
        folder = None
        try:
            folder = Folder.open(
                self._path,
                direct=self._settings.direct,
                sync=self._settings.sync,
                any_owner=self._settings.any_owner,
            )
            self.index = self._build(folder)
            self.folder = folder
        except TierError as fault:
            self.fault = fault
        except OSError as error:
            self.fault = as_tier_error(error, tier="disk", operation="open", where=self._path)
        finally:
            if folder is not None and self.folder is None:
                folder.close()

    def _build(self, folder: Folder) -> Index:
        free_bytes = folder.free_bytes
        index = Index(
            self._settings.policy,
            self._settings.max_bytes,
            folder.block_bytes,
            self._settings.learning,
            self._settings.changes,
        )
        rest = folder.batches()
        for found in rest:
            for value in with_pauses(found):
                for older in index.add_found([value]):
                    folder.remove(older)
            self.last_ns = max([self.last_ns, *(value.used_ns for value in found)])
            if len(index) >= SERVES_FROM:
                self.rest = rest
                break
        index.sort()
        index.limit_bytes = self._settings.max_bytes or max(
            0, free_bytes + index.used_bytes - self._settings.reserve_bytes
        )
        if index.limit_bytes == 0:
            _log.warning(
                "disk: %s: the free space is less than reserve_bytes, so nothing will be stored; "
                "set max_bytes",
                self._path,
            )
        return index


class OpenMore:
    """found: another batch of values, or None at the end"""

    def __init__(self, rest: Iterator[list[FoundValue]], path: str) -> None:
        self.found: list[FoundValue] | None = None
        self.fault: TierError | None = None
        self._rest = rest
        self._path = path

    def run(self, stop: Event) -> None:
        try:
            self.found = next(self._rest, None)
        except OSError as error:
            self.fault = as_tier_error(error, tier="disk", operation="open", where=self._path)


class RemoveNames:
    """left: the names of files that could not be removed"""

    def __init__(self, folder: Folder, names: Sequence[str]) -> None:
        self.left: list[str] = []
        self._folder = folder
        self._names = names

    def run(self, stop: Event) -> None:
        for name in self._names:
            try:
                self._folder.remove(name)
            except OSError as error:
                self.left.append(name)
                where = f"{self._folder.path}/{name}"
                _log.warning(
                    "%s", as_tier_error(error, tier="disk", operation="remove", where=where)
                )


class FileCheck:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.is_in_place = False
        self.fault: TierError | None = None

    def run(self, stop: Event) -> None:
        self.is_in_place = self._folder.is_in_place()
        try:
            self._folder.try_to_write()
        except OSError as error:
            self.fault = as_tier_error(
                error, tier="disk", operation="check", where=self._folder.path
            )


class Remove:
    def __init__(self, folder: Folder, entry: DiskEntry) -> None:
        self.entry = entry
        self.gone = False
        self.fault: TierError | None = None
        self._folder = folder

    def run(self, stop: Event) -> None:
        """`stop` is ignored: the entry was already taken."""
        try:
            self._folder.remove(self.entry.name)
            self.gone = True
        except OSError as error:
            self.fault = as_tier_error(
                error,
                tier="disk",
                operation="remove",
                where=f"{self._folder.path}/{self.entry.name}",
            )
            _log.warning("%s", self.fault)


class SyncRemovals:
    def __init__(self, folder: Folder, shard: str) -> None:
        self.fault: TierError | None = None
        self._folder = folder
        self._shard = shard

    def run(self, stop: Event) -> None:
        if stop.is_set():
            return
        try:
            self._folder.sync_removals(self._shard)
        except OSError as error:
            self.fault = as_tier_error(
                error, tier="disk", operation="sync", where=f"{self._folder.path}/{self._shard}"
            )


class Read:
    def __init__(
        self,
        folder: Folder,
        entry: DiskEntry,
        pieces: Sequence[memoryview],
        *,
        at: int | None,
        stamp_ns: int,
    ) -> None:
        self.entry = entry
        self.answer: int | TierError | None = None
        self.is_broken = False
        self.is_lost = False
        self._folder = folder
        self._pieces = pieces
        self._at = at
        self._stamp_ns = stamp_ns

    def run(self, stop: Event) -> None:
        if stop.is_set():
            return
        entry, folder = self.entry, self._folder
        try:
            self.answer = folder.read(
                entry.name, self._pieces, at=self._at, size=entry.nbytes, stamp_ns=self._stamp_ns
            )
            if self.answer is None:
                folder.remove(entry.name)
                self.is_broken = True
        except OSError as error:
            self.answer = as_tier_error(
                error, tier="disk", operation="get", where=f"{folder.path}/{entry.name}"
            )
            self.is_lost = not folder.is_in_place()


class FileWrite:
    def __init__(
        self,
        folder: Folder,
        entry: DiskEntry,
        pieces: Sequence[memoryview],
        *,
        stamp_ns: int,
        victims: list[Remove],
        may_reuse: bool,
    ) -> None:
        self.entry = entry
        self.victims = victims
        self.occupied_bytes: int | None = None
        self.fault: TierError | None = None
        self.is_lost = False
        self.is_left = False
        self._folder = folder
        self._pieces = pieces
        self._stamp_ns = stamp_ns
        self._may_reuse = may_reuse

    def run(self, stop: Event) -> None:
        """Overwrite a victim's file that occupies as many bytes; remove the others."""
        stopped = stop.is_set()
        reused = None if stopped or not self._may_reuse else self._victim_to_reuse()
        for victim in self.victims:
            if victim is not reused:
                victim.run(stop)
                self.fault = self.fault or victim.fault
        if stopped:
            self.fault = TierError("disk", "put", "cancelled")
        if self.fault is None:
            self._write(reused)
            if reused is not None:
                reused.run(stop)

    def _victim_to_reuse(self) -> Remove | None:
        return next(
            (
                victim
                for victim in self.victims
                if victim.entry.occupied_bytes == self.entry.occupied_bytes
            ),
            None,
        )

    def _write(self, reused: Remove | None) -> None:
        entry, folder = self.entry, self._folder
        try:
            self.occupied_bytes = folder.write(
                entry.name,
                self._pieces,
                stamp_ns=self._stamp_ns,
                reuse=reused.entry.name if reused else None,
            )
        except OSError as error:
            self.fault = as_tier_error(error, tier="disk", operation="put", where=folder.path)
            self.is_left = isinstance(error, FileLeft)
            self.is_lost = not folder.is_in_place()
