"""One disk: an index used by the loop, and a folder used by threads.

A call changes the index before its threads start, and settles this afterwards, even if cancelled.
"""

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from hashlib import blake2b

from kvhold.core.cleanup import on_error
from kvhold.core.errors import TierError, TierFull, TierIncomplete, TierUnavailable
from kvhold.core.sizes import format_size
from kvhold.core.turns import next_turn
from kvhold.tiers.base import FolderMet, Parts, size_of
from kvhold.tiers.bytes_by_age import BytesByAge
from kvhold.tiers.disk.folder import Folder, FoundValue
from kvhold.tiers.disk.index import DiskEntry, Index, PlannedFile
from kvhold.tiers.disk.jobs import (
    FileCheck,
    FileWrite,
    Open,
    OpenMore,
    Read,
    Remove,
    RemoveNames,
    StoreSettings,
    SyncRemovals,
)
from kvhold.tiers.files.names import shard_of
from kvhold.tiers.files.opener import Opener
from kvhold.tiers.files.threads import IoThreads
from kvhold.tiers.files.transfer import as_pieces

_log = logging.getLogger(__name__)

_DAY_NS = 86_400 * 10**9

_FOUND = 4  # listed values between two looks at the clock
_TURN_S = 0.0005
_MOST_KEYS = 500
_SCANS = 3  # a failed removal makes its value visible again


class _Opened:
    """writing: key -> future of the end of its write
    leaving: number of a removal -> its key and the future of its end
    own: during the listing: names of files written since the opening
    """

    def __init__(self, folder: Folder, index: Index, last_ns: int) -> None:
        self.folder = folder
        self.index = index
        self.writing: dict[bytes, asyncio.Future[None]] = {}
        self.leaving: dict[int, tuple[bytes, asyncio.Future[None]]] = {}
        self.num_restored = 0
        self.orphans_turn = asyncio.Lock()
        self.own: set[str] | None = None
        self.is_listed = False
        self.is_lost = False
        self._last_ns = last_ns

    def stamp_ns(self) -> int:
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        return self._last_ns

    def begin_write(self, entry: DiskEntry) -> None:
        self.writing[entry.key] = asyncio.get_running_loop().create_future()
        if self.own is not None:
            self.own.add(entry.name)

    def close(self) -> None:
        self.folder.close()


class DiskStore:
    def __init__(self, path: str, settings: StoreSettings) -> None:
        self._path = path
        self._path_digest = blake2b(path.encode(), digest_size=32).digest()
        self._settings = settings
        self._closing = False
        self._listing: asyncio.Task[None] | None = None
        self.met: FolderMet | None = None
        closed = TierUnavailable("disk", "open", f"{path} was closed")
        self._opener = Opener(self._open, _Opened.close, closed=closed)
        self._readers = IoThreads("kvhold-disk-read", settings.io_threads)
        self._writers = IoThreads("kvhold-disk-write", settings.io_threads)

    @property
    def used_bytes(self) -> int:
        return self._opener.place.index.used_bytes if self._opener.place else 0

    @property
    def limit_bytes(self) -> int:
        return self._opener.place.index.limit_bytes if self._opener.place else 0

    @property
    def index_bytes(self) -> int:
        return self._opener.place.index.index_bytes if self._opener.place else 0

    @property
    def held(self) -> BytesByAge | None:
        return self._opener.place.index.held if self._opener.place else None

    def weight(self, key: bytes) -> bytes:
        return blake2b(key, key=self._path_digest, digest_size=8).digest()

    async def check(self) -> None:
        async with self._opener.use() as opened:
            job = FileCheck(opened.folder)
            await self._writers.run([job.run])
            if not job.is_in_place:
                self._lose(opened)
                raise TierUnavailable(
                    "disk", "check", f"{self._path} was removed, or something was mounted over it"
                )
            if job.fault is not None:
                raise job.fault

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        async with self._opener.use() as opened:
            return [entry.nbytes if (entry := opened.index.find(key)) else None for key in keys]

    def used(
        self, keys: Sequence[bytes], prompt: int, value: int, at_s: float, *, are_whole: bool
    ) -> None:
        learning = self._settings.learning
        assert learning is not None
        heard = learning.used_elsewhere
        if self._opener.place is not None:
            heard = self._opener.place.index.used
        heard(keys, prompt, value, at_s, are_whole=are_whole)

    def admits(self, key: bytes, nbytes: int) -> bool:
        return self._opener.place is None or self._opener.place.index.admits(key, nbytes)

    async def keys(self, prefix: bytes) -> AsyncGenerator[list[bytes], None]:
        """In parts. A key may come twice.

        Waits for running writes. Raises TierUnavailable if the folder was lost, TierIncomplete if
        files stay that may be values at the next start.
        """
        async with self._opener.use() as opened:
            await self._all_listed(opened, "scan")
            # a cancelled put may still show its value
            await self._written(opened, [key for key in opened.writing if key.startswith(prefix)])
            num_restored: int | None = None
            for _ in range(_SCANS):
                if num_restored == opened.num_restored:
                    break
                await self._left(opened)
                num_restored = opened.num_restored
                async for keys in self._keys_by_shard(opened, prefix):
                    yield keys
                    await next_turn()
                await self._left(opened)
            if num_restored != opened.num_restored:
                raise TierIncomplete("disk", "scan", f"{self._path}: removals fail again and again")
            self._check_kept(opened, "scan")
            fault = await self._remove_orphans(opened, lambda key: key.startswith(prefix), "scan")
            await self._sync_removals(opened, opened.folder.unsynced)
            self._check_kept(opened, "scan")
            if fault is not None:
                raise fault

    async def _keys_by_shard(
        self, opened: _Opened, prefix: bytes
    ) -> AsyncGenerator[list[bytes], None]:
        by_shard: dict[str, list[bytes]] = {}
        try:
            for part in opened.index.keys(prefix):
                for key in part:
                    by_shard.setdefault(shard_of(key), []).append(key)
                await next_turn()
            while by_shard:
                _, keys = by_shard.popitem()
                for at in range(0, len(keys), _MOST_KEYS):
                    yield keys[at : at + _MOST_KEYS]
        finally:
            while by_shard:  # freeing a million keys at once would block the loop
                by_shard.popitem()
                await next_turn()

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], starts: Sequence[int] | None
    ) -> list[int | TierError | None]:
        """A file that differs from its index entry is a miss, and is removed."""
        answers: list[int | TierError | None] = [None] * len(keys)
        todo = list(range(len(keys)))
        async with self._opener.use() as opened:
            while todo:
                jobs: dict[int, Read] = {}
                for i in todo:
                    entry, wanted, start = (
                        opened.index.find(keys[i]),
                        size_of(into[i]),
                        None if starts is None else starts[i],
                    )
                    if entry is not None and (
                        entry.nbytes <= wanted
                        if start is None
                        else 0 <= start <= entry.nbytes - wanted
                    ):
                        stamp_ns = opened.stamp_ns()
                        opened.index.read(entry, stamp_ns)
                        jobs[i] = Read(
                            opened.folder, entry, as_pieces(into[i]), at=start, stamp_ns=stamp_ns
                        )
                try:
                    await self._readers.run([job.run for job in jobs.values()])
                finally:
                    for job in jobs.values():
                        self._settle_read(opened, job)
                for i in todo:
                    answers[i] = jobs[i].answer if i in jobs else None
                todo = [
                    i for i, job in jobs.items() if job.is_broken and opened.index.find(keys[i])
                ]
        return answers

    async def put(self, items: Sequence[tuple[bytes, Parts]]) -> list[TierError | None]:
        """If another call writes a key, wait, and write if it failed."""
        faults: list[TierError | None] = [None] * len(items)
        todo = list(range(len(items)))
        async with self._opener.use() as opened:
            while todo:
                jobs, waiting = self._plan(opened, items, todo, faults)
                others = {opened.writing[items[i][0]] for i in waiting}
                try:
                    await self._writers.run([job.run for job in jobs.values()])
                finally:
                    for i, job in jobs.items():
                        faults[i] = self._settle_write(opened, job)
                await self._trim(opened)
                if others:
                    await asyncio.wait(others)
                todo = waiting
        return faults

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Show each new file before the old one is removed."""
        answers: dict[bytes, bool | TierError] = {}
        async with self._opener.use() as opened:
            await self._written(opened, [key for key, _ in items])
            jobs = self._plan_over(opened, dict(reversed(items)), answers)
            try:
                await self._writers.run([job.run for _, job in jobs])
            finally:
                settled = [self._settle_over(opened, old, job, answers) for old, job in jobs]
                await self._remove(
                    opened, self._leave(opened, [old for old in settled if old is not None])
                )
            await self._trim(opened)
        return [answers[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Durable even without `sync`, because a clear is forgotten after it.

        Raises TierIncomplete at the end if another file of a key could not be removed.
        """
        async with self._opener.use() as opened:
            await self._all_listed(opened, "delete")  # a file listed later would come back
            while (
                await self._written(opened, [key for key in keys if opened.index.find(key)])
                # a replacement ends with the removal of the old file
                or await self._left(opened, set(keys))
            ):
                pass
            jobs: dict[int, Remove] = {}
            for i, key in enumerate(keys):
                entry = opened.index.find(key)
                if entry is not None:
                    opened.index.take(entry)
                    [jobs[i]] = self._leave(opened, (entry,))
            await self._remove(opened, list(jobs.values()))
            fault = await self._remove_orphans(opened, frozenset(keys).__contains__, "delete")
            shards = {shard_of(key) for key in keys}
            await self._sync_removals(opened, shards.intersection(opened.folder.unsynced))
            self._check_kept(opened, "delete")
            if fault is not None:
                raise fault
            return [i in jobs and jobs[i].gone for i in range(len(keys))]

    async def close(self) -> None:
        self._closing = True
        if self._listing is not None:
            await asyncio.wait((self._listing,))
        await self._opener.close()
        self._readers.close()
        self._writers.close()

    async def _open(self) -> _Opened:
        job = Open(self._path, self._settings)
        await self._writers.run([job.run])
        if job.fault is not None:
            raise job.fault
        assert job.folder is not None and job.index is not None
        if self.met is not None:
            with on_error(job.folder.close):
                await self.met(self._path, job.folder.identity)
        last_ns = max(job.began_ns, min(job.last_ns, time.time_ns() + _DAY_NS))
        opened = _Opened(job.folder, job.index, last_ns)
        if job.rest is not None:
            opened.own = set()
            self._listing = asyncio.create_task(self._list_rest(opened, job.rest, opened.own))
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())
            return opened
        opened.is_listed = True
        await self._trim(opened)
        used, limit = format_size(job.index.used_bytes), format_size(job.index.limit_bytes)
        _log.info("disk: %s: %d values, %s of %s", self._path, len(job.index), used, limit)
        return opened

    async def _list_rest(
        self, opened: _Opened, rest: Iterator[list[FoundValue]], own: set[str]
    ) -> None:
        async with self._opener.use() as held:
            if held is opened:
                await self._list_more(opened, rest, own)
                opened.own = None

    async def _all_listed(self, opened: _Opened, operation: str) -> None:
        if not opened.is_listed and self._listing is not None:
            await asyncio.wait((self._listing,))
        if not opened.is_listed and not self._closing:
            self._lose(opened)
        if not opened.is_listed:
            raise TierUnavailable("disk", operation, f"{self._path} could not be listed")
        self._check_kept(opened, operation)

    def _check_kept(self, opened: _Opened, operation: str) -> None:
        if opened.is_lost:
            raise TierUnavailable("disk", operation, f"{self._path} was lost during the call")

    async def _list_more(
        self, opened: _Opened, rest: Iterator[list[FoundValue]], own: set[str]
    ) -> None:
        index = opened.index
        while not self._closing and self._opener.place is opened:
            more = OpenMore(rest, self._path)
            await self._readers.run([more.run])
            if more.fault is not None:
                _log.warning("%s", more.fault)
                self._lose(opened)
                return
            if more.found is None:
                break
            older = list[str]()
            until_s = time.perf_counter() + _TURN_S
            for at in range(0, len(more.found), _FOUND):
                before_bytes = index.used_bytes
                older += index.add_found(
                    more.found[at : at + _FOUND], own=own, writing=opened.writing
                )
                if not self._settings.max_bytes:
                    index.limit_bytes += index.used_bytes - before_bytes
                if time.perf_counter() >= until_s:
                    await next_turn()
                    until_s = time.perf_counter() + _TURN_S
            if older:
                removal = RemoveNames(opened.folder, older)
                try:
                    await self._writers.run([removal.run])
                finally:
                    for name in removal.left:
                        index.add_orphan(name)
        else:
            return
        await self._sort(index)
        await self._trim(opened)
        opened.is_listed = True
        _log.info(
            "disk: %s: all %d values are listed, %s",
            self._path,
            len(index),
            format_size(index.used_bytes),
        )

    async def _sort(self, index: Index) -> None:
        sorting = index.sorting()
        for _ in sorting.look():
            await next_turn()
        await self._readers.run([lambda stop: sorting.sort()])
        for _ in sorting.link():
            await next_turn()

    def _lose(self, opened: _Opened) -> None:
        opened.is_lost = True
        if self._opener.lose(opened):
            _log.warning(
                "disk: %s was lost with %d values; the next call opens it again",
                self._path,
                len(opened.index),
            )

    def _plan(
        self,
        opened: _Opened,
        items: Sequence[tuple[bytes, Parts]],
        todo: Sequence[int],
        faults: list[TierError | None],
    ) -> tuple[dict[int, FileWrite], list[int]]:
        jobs: dict[int, FileWrite] = {}
        waiting = []
        for i in todo:
            key, parts = items[i]
            faults[i] = None
            if key in opened.writing:
                waiting.append(i)
            elif opened.index.find(key) is None:
                pieces, nbytes, stamp_ns = as_pieces(parts), size_of(parts), opened.stamp_ns()
                planned = opened.index.reserve(key, stamp_ns, nbytes)
                if planned is None:
                    limit = format_size(opened.index.limit_bytes)
                    faults[i] = TierFull(
                        "disk",
                        "put",
                        f"{self._path}: no room for {nbytes} bytes within {limit}; raise max_bytes",
                    )
                    continue
                jobs[i] = self._begin_write(opened, planned, pieces, stamp_ns)
        return jobs, waiting

    def _plan_over(
        self, opened: _Opened, values: Mapping[bytes, Parts], answers: dict[bytes, bool | TierError]
    ) -> list[tuple[DiskEntry, FileWrite]]:
        jobs: list[tuple[DiskEntry, FileWrite]] = []
        for key, parts in values.items():
            old, nbytes, stamp_ns = opened.index.find(key), size_of(parts), opened.stamp_ns()
            if old is None:
                answers[key] = False
                continue
            opened.index.hold(old)
            planned = opened.index.reserve(key, stamp_ns, nbytes, beside=old)
            if planned is None:
                opened.index.unread(old)
                limit = format_size(opened.index.limit_bytes)
                answers[key] = TierFull(
                    "disk",
                    "replace",
                    f"{self._path}: no room for {nbytes} bytes beside the old value within {limit}",
                )
                continue
            jobs.append((old, self._begin_write(opened, planned, as_pieces(parts), stamp_ns)))
        return jobs

    def _begin_write(
        self, opened: _Opened, planned: PlannedFile, pieces: list[memoryview], stamp_ns: int
    ) -> FileWrite:
        opened.begin_write(planned.entry)
        return FileWrite(
            opened.folder,
            planned.entry,
            pieces,
            stamp_ns=stamp_ns,
            victims=self._leave(opened, planned.victims),
            # with `sync`, a power cut could leave new bytes under the old name
            may_reuse=not self._settings.sync,
        )

    def _settle_over(
        self,
        opened: _Opened,
        old: DiskEntry,
        job: FileWrite,
        answers: dict[bytes, bool | TierError],
    ) -> DiskEntry | None:
        index, key = opened.index, old.key
        self._settle_removed(opened, job.victims)
        index.unread(old)
        opened.writing.pop(key).set_result(None)
        if job.is_lost:
            self._lose(opened)
        if job.occupied_bytes is None:
            index.abandon(job.entry, is_orphan=job.is_left)
            answers[key] = job.fault or TierError("disk", "replace", "cancelled")
            return None
        if index.holds(old):
            index.swap(old, job.entry, job.occupied_bytes)
            answers[key] = True
            return old
        answers[key] = False
        index.commit(job.entry, job.occupied_bytes)
        index.take(job.entry)
        return job.entry

    async def _written(self, opened: _Opened, keys: Sequence[bytes]) -> bool:
        waited = False
        while others := {opened.writing[key] for key in keys if key in opened.writing}:
            await asyncio.wait(others)
            waited = True
        return waited

    def _settle_read(self, opened: _Opened, job: Read) -> None:
        index, entry = opened.index, job.entry
        if job.is_broken and index.holds(entry):
            index.take(entry)
            index.finish(entry)
        index.unread(entry)
        if job.is_lost:
            self._lose(opened)

    def _settle_write(self, opened: _Opened, job: FileWrite) -> TierError | None:
        self._settle_removed(opened, job.victims)
        if job.occupied_bytes is None:
            opened.index.abandon(job.entry, is_orphan=job.is_left)
        else:
            opened.index.commit(job.entry, job.occupied_bytes)
        opened.writing.pop(job.entry.key).set_result(None)
        if job.is_lost:
            self._lose(opened)
        return job.fault

    async def _left(self, opened: _Opened, keys: Collection[bytes] | None = None) -> bool:
        others = [gone for key, gone in opened.leaving.values() if keys is None or key in keys]
        if others:
            await asyncio.wait(others)
        return bool(others)

    def _leave(self, opened: _Opened, entries: Iterable[DiskEntry]) -> list[Remove]:
        jobs = [Remove(opened.folder, entry) for entry in entries]
        for job in jobs:
            opened.leaving[id(job)] = job.entry.key, asyncio.get_running_loop().create_future()
        return jobs

    def _settle_removed(self, opened: _Opened, jobs: Sequence[Remove]) -> None:
        for job in jobs:
            if job.gone:
                opened.index.finish(job.entry)
            else:
                opened.index.restore(job.entry, writing=opened.writing)
                opened.num_restored += 1
            opened.leaving.pop(id(job))[1].set_result(None)

    async def _remove_orphans(
        self, opened: _Opened, chosen: Callable[[bytes], bool], operation: str
    ) -> TierIncomplete | None:
        async with opened.orphans_turn:
            jobs = [Remove(opened.folder, entry) for entry in opened.index.orphans(chosen)]
            try:
                await self._writers.run([job.run for job in jobs])
            finally:
                for job in jobs:
                    if job.gone:
                        opened.index.finish_orphan(job.entry)
        faults = [job.fault for job in jobs if job.fault is not None]
        if not faults:
            return None
        return TierIncomplete(
            "disk", operation, f"{len(faults)} old files could not be removed: {faults[0]}"
        )

    async def _sync_removals(self, opened: _Opened, shards: Collection[str]) -> None:
        jobs = [SyncRemovals(opened.folder, shard) for shard in shards]
        await self._writers.run([job.run for job in jobs])
        for job in jobs:
            if job.fault is not None:
                raise job.fault

    async def _trim(self, opened: _Opened) -> None:
        victims = opened.index.evict(opened.index.excess_bytes)
        await self._remove(opened, self._leave(opened, victims or ()))

    async def _remove(self, opened: _Opened, jobs: list[Remove]) -> None:
        try:
            await self._writers.run([job.run for job in jobs])
        finally:
            self._settle_removed(opened, jobs)
