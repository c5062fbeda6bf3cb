"""The shared file system tier: values as files that many hosts write, read and delete at once.

    # fs:///mnt/shared/kvhold
    tier = SharedFilesTier.from_url(parse_url(...)); await tier.put(...); await tier.close()

    new/<host>.<pid>.<n>.<r>  a file that is being written
    <hh>/<key>                a value, as large as the file; hh is a byte of the key

The tier has no lock, no index and no limit. The operator of the file system decides how long values
stay, and removes them.

A value is written under a unique temporary name and then linked to its own name, which never
overwrites. Where links are not supported, the file is renamed unless the value exists by then. A
replacement is written in the same way, and the two files exchange their names in one step. Network
file systems may not support the exchange; there, nothing is replaced. Removing a file does not
disturb its readers.

Used from one event loop. All I/O is in threads; lookups have threads of their own, apart from reads
and writes. Left out: detecting a file that a third party has cut short. The frame's checksums do
it.
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

from kvhold.core.config import setting
from kvhold.core.errors import ConfigError, TierError, TierUnavailable
from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.tiers.base import Parts, TierTraits, check_lengths
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
    """The settings of a shared file system tier."""

    path: str = setting("", "folder for the values, the same for all hosts")
    direct: str = setting(
        "auto", "O_DIRECT, which spares the page cache", choices=("auto", "never", "always")
    )
    sync: bool = setting(
        False, "fsync each value and its folder, so that it survives a power cut of the file server"
    )
    io_threads: int = setting(
        8, "threads that read, as many that write, and as many that look things up", minimum=1
    )
    any_owner: bool = setting(
        False,
        "use a folder that belongs to another user or to a group; who can write there can forge KV",
    )
    stale_s: float = setting(
        86_400.0, "another host's temporary files are removed when they are older", minimum=60
    )


class SharedFilesTier:
    """Values in a folder that other hosts use too."""

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
        """Make the tier from `fs:///path?options`. Raises ConfigError."""
        if url.netloc:
            raise ConfigError(
                f"{url.shown}: a folder's path is absolute: write fs:///path, with three slashes"
            )
        if ",/" in url.path:
            folders = " ".join(f"fs://{folder}" for folder in url.path.split(","))
            raise ConfigError(f"{url.shown}: a tier is one folder; name several tiers: {folders}")
        return cls(url.apply(SharedFilesConfig(path=url.path)))

    async def check(self) -> None:
        """Tier contract.

        A folder that is only readable passes; puts then fail with their own fault.
        """
        async with self._opener.use() as tree:
            (is_in_place,) = await self._run(self._lookers, tree, "check", [tree.is_in_place])
            if is_in_place is not True:
                self._opener.lose(tree)
                raise TierUnavailable(
                    "fs",
                    "check",
                    f"{self._path} was removed, or something was mounted over it; is it mounted?",
                )

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """Tier contract. One stat per key, side by side."""
        async with self._opener.use() as tree:
            states = await self._run(
                self._lookers, tree, "probe", [partial(tree.stat_file, _name(key)) for key in keys]
            )
            _raise_if_all(states)
            return [
                None if state is None or isinstance(state, TierError) else state.st_size
                for state in states
            ]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        """Tier contract."""
        check_lengths(keys, into, starts)
        async with self._opener.use() as tree:
            calls = [
                partial(
                    tree.read,
                    _name(key),
                    as_pieces(parts),
                    at=None if starts is None else starts[i],
                )
                for i, (key, parts) in enumerate(zip(keys, into, strict=True))
            ]
            return await self._run(self._readers, tree, "get", calls)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        """Tier contract. Ignores ttl_s: the operator of the file system removes values."""
        first = dict(reversed(items))  # if a key occurs twice, its first value counts
        async with self._opener.use() as tree:
            calls = [
                partial(_publish, tree, _name(key), as_pieces(parts))
                for key, parts in first.items()
            ]
            answers = await self._run(self._writers, tree, "put", calls)
        faults = dict(zip(first, answers, strict=True))
        return [faults[key] for key, _ in items]

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        """Tier contract.

        The new file keeps the old one's mtime, since a cleaner may remove files by age.
        """
        first = dict(reversed(items))
        async with self._opener.use() as tree:
            calls = [
                partial(_publish_over, tree, _name(key), as_pieces(parts))
                for key, parts in first.items()
            ]
            answers = await self._run(self._writers, tree, "replace", calls)
        done = {
            key: answer if isinstance(answer, TierError) else answer is True
            for key, answer in zip(first, answers, strict=True)
        }
        return [done[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Tier contract. A file that cannot be removed is still found; its answer is false."""
        once = dict.fromkeys(keys)
        async with self._opener.use() as tree:
            answers = await self._run(
                self._lookers, tree, "delete", [partial(tree.remove, _name(key)) for key in once]
            )
        _raise_if_all(answers)
        removed = {key: answer is True for key, answer in zip(once, answers, strict=True)}
        return [removed.pop(key, False) for key in keys]

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Tier contract.

        Lists the folders side by side before it yields, so the keys of all values must fit in
        memory.
        """
        async with self._opener.use() as tree:
            shards = (
                [shard_of(prefix)]
                if len(prefix) > NAMESPACE_BYTES
                else [f"{n:02x}" for n in range(256)]
            )
            listed = await self._run(
                self._lookers, tree, "scan", [partial(tree.names, shard) for shard in shards]
            )
        _raise_if_all(listed)
        for shard, names in zip(shards, listed, strict=True):
            if isinstance(names, TierError):
                _log.warning("%s", names)
                continue
            for name in names or ():
                key = _key(name)
                if key is not None and shard_of(key) == shard and key.startswith(prefix):
                    yield key

    async def close(self) -> None:
        """Tier contract. Waits for calls that are under way."""
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
        """Run the calls in threads. Return each call's result, or its fault."""
        jobs = [_Job(call, operation=operation, path=self._path, tree=tree) for call in calls]
        await threads.run([job.run for job in jobs])
        if any(job.is_lost for job in jobs) and self._opener.lose(tree):
            _log.warning("fs: %s was lost; the next call opens it anew", self._path)
        return [job.fault or job.answer for job in jobs]


class _Job(Generic[Answer]):
    """A blocking call for a thread. The result is `answer` or `fault`.

    `is_lost` is set if the folder is no longer the one at its path.
    """

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
        """Blocking."""
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
    """Write a value unless it exists. Blocking."""
    if tree.stat_file(name) is not None:
        return
    temporary, _ = tree.write_new(pieces, allocate=False)
    try:
        tree.link(temporary, name)
    except FileExistsError:
        pass  # another writer was faster
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if tree.stat_file(name) is None:
            tree.rename(temporary, name)
    finally:
        tree.remove(temporary)


def _publish_over(tree: FileTree, name: str, pieces: Sequence[memoryview]) -> bool:
    """Replace a value; return false if there is none. Blocking."""
    old = tree.stat_file(name)
    if old is None:
        return False
    temporary, _ = tree.write_new(pieces, allocate=False, used_ns=old.st_mtime_ns)
    try:
        tree.exchange(temporary, name)
    except FileNotFoundError:
        return False  # another process has removed it
    finally:
        tree.remove(temporary)
    return True


def _name(key: bytes) -> str:
    return f"{shard_of(key)}/{key.hex()}"


def _key(name: str) -> bytes | None:
    """Return the key in a file's name; None for a foreign file."""
    if len(name) != _KEY_DIGITS or name != name.lower():
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _raise_if_all(answers: Sequence[object]) -> None:
    """Raise the first fault if every item failed: then the whole place is at fault."""
    for answer in answers:
        if not isinstance(answer, TierError):
            return
    for answer in answers:
        if isinstance(answer, TierError):
            raise answer
