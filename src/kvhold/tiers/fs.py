"""Values as files for many hosts.

    new/<host>.<pid>.<n>.<r>  a file that is being written
    <hh>/<key>                a value; hh is a byte of the key

A temporary file is linked to its final name, which never overwrites; without links, renamed if no
value exists.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from errno import EMLINK, ENOSYS, EOPNOTSUPP, EPERM
from functools import partial
from os.path import normpath
from threading import Event
from typing import ClassVar, Generic, Self, TypeVar

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ConfigError, TierError, TierIncomplete, TierUnavailable
from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.core.setting import setting
from kvhold.tiers.base import Parts, TierTraits, check_lengths, raise_if_all_failed
from kvhold.tiers.files.faults import as_tier_error
from kvhold.tiers.files.names import is_leftover, shard_of
from kvhold.tiers.files.opener import Opener
from kvhold.tiers.files.threads import IoThreads
from kvhold.tiers.files.transfer import as_pieces
from kvhold.tiers.files.tree import NEW, FileTree
from kvhold.tiers.url import TierUrl

_log = logging.getLogger(__name__)

_KEY_DIGITS = 2 * KEY_BYTES
_NO_LINKS = frozenset({EPERM, EOPNOTSUPP, ENOSYS, EMLINK})

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class SharedFilesConfig:
    path: str = setting("", "folder for the values, the same for all hosts")
    direct: str = setting(
        "auto", "O_DIRECT, to bypass the page cache", choices=("auto", "never", "always")
    )
    sync: bool = setting(
        False, "fsync each value and its folder, so that it survives a power cut of the file server"
    )
    io_threads: int = setting(
        8, "threads for reads, as many for writes, and as many for lookups", minimum=1
    )
    any_owner: bool = setting(
        False,
        "use a folder of another user or of a group; anyone who can write there can forge KV",
    )
    stale_s: float = setting(
        86_400.0, "age at which another host's temporary files are removed", minimum=60
    )


class SharedFilesTier:
    traits: ClassVar[TierTraits] = TierTraits(name="fs", durable=True, shared=True, replaces=True)

    def __init__(self, config: SharedFilesConfig) -> None:
        if not config.path.startswith("/") or config.io_threads < 1:
            raise ConfigError(
                f"fs: path = {config.path!r}: write an absolute path, such as "
                "fs:///mnt/shared/kvhold"
            )
        self._config = config
        self._path = normpath(config.path)
        closed = TierUnavailable("fs", "open", f"{self._path} was closed")
        self._opener = Opener(self._open, FileTree.close, closed=closed)
        self._lookers, self._readers, self._writers = (
            IoThreads(f"kvhold-fs-{n}", config.io_threads) for n in ("look", "read", "write")
        )

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        if url.netloc:
            raise ConfigError(
                f"{url.shown}: a folder's path is absolute: write fs:///path, with three slashes"
            )
        if ",/" in url.path:
            folders = " ".join(f"fs://{folder}" for folder in url.path.split(","))
            raise ConfigError(f"{url.shown}: a tier is one folder; name several tiers: {folders}")
        return cls(url.apply(SharedFilesConfig(path=url.path)))

    async def check(self) -> None:
        async with self._opener.use() as tree:
            (is_in_place,) = await self._run(self._lookers, tree, "check", [tree.is_in_place])
            if is_in_place is not True:
                self._opener.lose(tree)
                raise TierUnavailable(
                    "fs",
                    "check",
                    f"{self._path} was removed, or something was mounted over it; is it mounted?",
                )

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        async with self._opener.use() as tree:
            states = await self._run(
                self._lookers,
                tree,
                "probe",
                [partial(tree.stat_file, _name_of(key)) for key in keys],
            )
            raise_if_all_failed(states)
            return [
                state if state is None or isinstance(state, TierError) else state.st_size
                for state in states
            ]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        async with self._opener.use() as tree:
            calls = [
                partial(
                    tree.read,
                    _name_of(key),
                    as_pieces(parts),
                    at=None if starts is None else starts[i],
                )
                for i, (key, parts) in enumerate(zip(keys, into, strict=True))
            ]
            return await self._run(self._readers, tree, "get", calls)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        first = dict(reversed(items))
        async with self._opener.use() as tree:
            calls = [
                partial(_publish, tree, _name_of(key), as_pieces(parts))
                for key, parts in first.items()
            ]
            answers = await self._run(self._writers, tree, "put", calls)
        faults = dict(zip(first, answers, strict=True))
        return [faults[key] for key, _ in items]

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Keeps the mtime: a cleaner may remove files by age."""
        first = dict(reversed(items))
        async with self._opener.use() as tree:
            calls = [
                partial(_publish_over, tree, _name_of(key), as_pieces(parts))
                for key, parts in first.items()
            ]
            answers = await self._run(self._writers, tree, "replace", calls)
        done = {
            key: answer if isinstance(answer, TierError) else answer is True
            for key, answer in zip(first, answers, strict=True)
        }
        return [done[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Raises TierIncomplete: a file could not be removed."""
        once = dict.fromkeys(keys)
        async with self._opener.use() as tree:
            answers = await self._run(
                self._lookers, tree, "delete", [partial(tree.remove, _name_of(key)) for key in once]
            )
            shards = dict.fromkeys(shard_of(key) for key in once if self._config.sync)
            synced = await self._run(
                self._lookers,
                tree,
                "delete",
                [partial(tree.sync_folder, shard) for shard in shards],
            )
        raise_if_all_failed(answers)
        for fault in synced:
            if isinstance(fault, TierError):
                raise fault
        _raise_if_any(answers, "delete")
        removed = {key: answer is True for key, answer in zip(once, answers, strict=True)}
        return [removed.pop(key, False) for key in keys]

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """The keys must fit in memory. Raises TierIncomplete at the end: an unlisted folder."""
        async with self._opener.use() as tree:
            shards = (
                [shard_of(prefix)]
                if len(prefix) > NAMESPACE_BYTES
                else [f"{n:02x}" for n in range(256)]
            )
            listed = await self._run(
                self._lookers, tree, "scan", [partial(tree.names, shard) for shard in shards]
            )
        raise_if_all_failed(listed)
        for shard, names in zip(shards, listed, strict=True):
            if isinstance(names, TierError):
                continue
            for name in names or ():
                key = _key(name)
                if key is not None and shard_of(key) == shard and key.startswith(prefix):
                    yield key
        _raise_if_any(listed, "scan")

    async def close(self) -> None:
        await self._opener.close()
        for threads in (self._lookers, self._readers, self._writers):
            threads.close()

    async def _open(self) -> FileTree:
        job = _Job(self._open_tree, operation="open", path=self._path)
        await self._lookers.run([job.run])
        if job.fault is not None:
            raise job.fault
        assert job.answer is not None
        _log.info("fs: %s", self._path)
        return job.answer

    def _open_tree(self) -> FileTree:
        tree = FileTree.open(
            self._path,
            direct=self._config.direct,
            sync=self._config.sync,
            any_owner=self._config.any_owner,
        )
        with on_error(tree.close):
            for name in tree.names(NEW):
                state = tree.stat_file(f"{NEW}/{name}")
                if state is not None and is_leftover(
                    name, age_s=time.time() - state.st_mtime, stale_s=self._config.stale_s
                ):
                    tree.remove(f"{NEW}/{name}")
        return tree

    async def _run(
        self,
        threads: IoThreads,
        tree: FileTree,
        operation: str,
        calls: Sequence[Callable[[], Answer]],
    ) -> list[Answer | TierError | None]:
        jobs = [_Job(call, operation=operation, path=self._path, tree=tree) for call in calls]
        await threads.run([job.run for job in jobs])
        if any(job.is_lost for job in jobs) and self._opener.lose(tree):
            _log.warning("fs: %s was lost; the next call opens it again", self._path)
        return [job.fault or job.answer for job in jobs]


class _Job(Generic[Answer]):
    def __init__(
        self, call: Callable[[], Answer], *, operation: str, path: str, tree: FileTree | None = None
    ) -> None:
        self.answer: Answer | None = None
        self.fault: TierError | None = None
        self.is_lost = False
        self._call = call
        self._operation = operation
        self._path = path
        self._tree = tree

    def run(self, stop: Event) -> None:
        if stop.is_set():
            return
        try:
            self.answer = self._call()
        except OSError as error:
            self.fault = as_tier_error(
                error, tier="fs", operation=self._operation, where=self._path
            )
            self.is_lost = self._tree is not None and not self._tree.is_in_place()


def _publish(tree: FileTree, name: str, pieces: Sequence[memoryview]) -> None:
    if tree.stat_file(name) is not None:
        return
    temporary, _ = tree.write_new(pieces, allocate=False)
    try:
        tree.link(temporary, name)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if tree.stat_file(name) is None:
            tree.rename(temporary, name)
    finally:
        tree.remove(temporary)


def _publish_over(tree: FileTree, name: str, pieces: Sequence[memoryview]) -> bool:
    old = tree.stat_file(name)
    if old is None:
        return False
    temporary, _ = tree.write_new(pieces, allocate=False, used_ns=old.st_mtime_ns)
    try:
        tree.exchange(temporary, name)
    except FileNotFoundError:
        return False
    finally:
        tree.remove(temporary)
    return True


def _name_of(key: bytes) -> str:
    return f"{shard_of(key)}/{key.hex()}"


def _key(name: str) -> bytes | None:
    if len(name) != _KEY_DIGITS or name != name.lower():
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _raise_if_any(answers: Sequence[object], operation: str) -> None:
    for answer in answers:
        if isinstance(answer, TierError):
            raise TierIncomplete("fs", operation, f"a part of the folder failed: {answer}")
