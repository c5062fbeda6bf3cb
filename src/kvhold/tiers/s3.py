"""Values as objects of a bucket, in AWS, Ceph, MinIO, R2 and others.

- **Put.** A conditional PUT (`If-None-Match: *`) keeps a key's first value. A HEAD instead, with
  `put_if_absent=false` or from `multipart_bytes` on: the last concurrent writer wins.
- **Replace.** A PUT with `If-Match`. Off with `put_if_absent=false`: such a store may ignore it.
- **Miss.** Needs the right to list the bucket: else S3 answers 403.
- **Expiry.** Set lifecycle rules for values, and for multipart uploads of killed processes.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

from kvhold.core.errors import ConfigError, TierDenied, TierError, TierUnavailable
from kvhold.core.keys import KEY_BYTES, NAMESPACE_BYTES
from kvhold.tiers.base import Parts, TierTraits, check_lengths, in_thread, size_of
from kvhold.tiers.s3_faults import (
    OBSTORE_FAULTS,
    BucketPlace,
    code_of_kept,
    fault_of,
    is_conflict,
    is_missing_object,
    status_of,
)
from kvhold.tiers.s3_store import S3Config, check_config, endpoint_url, open_store, prefix_of
from kvhold.tiers.url import TierUrl

__all__ = ["S3Config", "S3Tier"]

Result = TypeVar("Result")

_COPY_IN_THREAD = 256 << 10  # below it, a thread costs more than the copy
_COPY_THREADS = 2
_PARTS_AT_ONCE = 4
_REPLACE_ROUNDS = 3
_DELETE_ROUNDS = 3
_ABORT_S = 5.0
# at exit, a wait of obstore's threads for the GIL aborts the process
_HAND_BACK_S = 0.01
_LAST = "z"  # sorts after all names of this tier


class S3Tier:
    def __init__(self, config: S3Config) -> None:
        check_config(config)
        self.traits = TierTraits(
            name="s3", durable=True, shared=True, replaces=config.put_if_absent
        )
        self._config = config
        self._root = prefix_of(config)
        self._place = BucketPlace(self.traits.name, config.bucket, endpoint_url(config))
        self._transfers = asyncio.Semaphore(config.parallel)
        self._questions = asyncio.Semaphore(config.parallel_probes)
        self._store: S3Store | None = None
        self._copiers: ThreadPoolExecutor | None = None

    @classmethod
    def from_url(cls, url: TierUrl) -> "S3Tier":
        if "@" in url.netloc:
            raise ConfigError(
                "s3: credentials go into the environment, or the options access_key_id and "
                "secret_access_key; not before an @"
            )
        return cls(url.apply(S3Config(bucket=url.netloc, prefix=url.path)))

    async def check(self) -> None:
        try:
            await obstore.list(
                self._client(), self._root or None, offset=f"{self._root}{_LAST}"
            ).collect_async()
        except OBSTORE_FAULTS as error:
            raise self._fault(error, "check") from None

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        """A missing bucket gives misses."""
        return [_raised(found) for found in await _all([self._size(key, "probe") for key in keys])]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        calls = [
            self._get(key, parts, None if starts is None else starts[i])
            for i, (key, parts) in enumerate(zip(keys, into, strict=True))
        ]
        return _unless_all_failed(await _all(calls))

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        first = dict(reversed(items))
        faults = _unless_all_failed(
            await _all([self._put(key, parts) for key, parts in first.items()])
        )
        answers = dict(zip(first, faults, strict=True))
        return [answers[key] for key, _ in items]

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        first = dict(reversed(items))
        answers = _unless_all_failed(
            await _all([self._replace(key, parts) for key, parts in first.items()])
        )
        done = dict(zip(first, answers, strict=True))
        return [done[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        unique = list(dict.fromkeys(keys))
        sizes = [
            _raised(found) for found in await _all([self._size(key, "delete") for key in unique])
        ]
        there = {key for key, nbytes in zip(unique, sizes, strict=True) if nbytes is not None}
        if there:
            await self._delete([self._name_of(key) for key in there])
        return [key in there and key not in keys[:i] for i, key in enumerate(keys)]

    async def _delete(self, names: list[str]) -> None:
        """Ceph refuses to remove an object that is being replaced (UnknownError)."""
        for turn in range(_DELETE_ROUNDS):
            try:
                await obstore.delete_async(self._client(), names)
            except OBSTORE_FAULTS as error:
                fault = self._fault(error, "delete")
                if code_of_kept(error) in ("", "AccessDenied") or turn == _DELETE_ROUNDS - 1:
                    raise fault from None
            else:
                return

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        async for name in self._names(
            prefix[:NAMESPACE_BYTES].hex() if len(prefix) >= NAMESPACE_BYTES else ""
        ):
            key = self._key(name)
            if key is not None and key.startswith(prefix):
                yield key

    async def close(self) -> None:
        if self._copiers is not None:
            self._copiers.shutdown(wait=False)
            self._copiers = None
        if self._store is not None:
            self._store = None
            await asyncio.sleep(_HAND_BACK_S)

    def _client(self) -> S3Store:
        if self._store is None:
            self._store = open_store(self._config)
        return self._store

    def _name_of(self, key: bytes) -> str:
        return f"{self._root}{key[:NAMESPACE_BYTES].hex()}/{key[NAMESPACE_BYTES:].hex()}"

    def _key(self, name: str) -> bytes | None:
        with suppress(ValueError):
            key = bytes.fromhex(name[len(self._root) :].replace("/", "", 1))
            return key if len(key) == KEY_BYTES and self._name_of(key) == name else None
        return None

    def _fault(self, error: BaseException, operation: str) -> TierError:
        """Drop the traceback, whose frames hold the caller's memory: obstore may keep the error."""
        error.__traceback__ = None
        return fault_of(error, operation=operation, place=self._place)

    async def _size(self, key: bytes, operation: str) -> int | TierError | None:
        async with self._questions:
            try:
                return (await obstore.head_async(self._client(), self._name_of(key)))[
                    "size"
                ] or None
            except FileNotFoundError:
                return None
            except OBSTORE_FAULTS as error:
                return self._fault(error, operation)

    async def _get(self, key: bytes, parts: Parts, start: int | None) -> int | TierError | None:
        wanted = size_of(parts)
        async with self._transfers:
            try:
                if start is None:
                    data = await self._whole(key, wanted)
                elif wanted:
                    data = await obstore.get_range_async(
                        self._client(), self._name_of(key), start=start, length=wanted
                    )
                else:
                    there = (await obstore.head_async(self._client(), self._name_of(key)))["size"]
                    return 0 if start <= there else None
            except OBSTORE_FAULTS as error:
                fault = self._fault(error, "get")
                # the range begins beyond the end
                return None if is_missing_object(error) or status_of(error) == 416 else fault
            if data is None or (start is not None and len(data) < wanted):
                return None
            await self._copy(memoryview(data), parts)
            return len(data)

    async def _whole(self, key: bytes, room: int) -> "obstore.Bytes | None":
        answer = await obstore.get_async(self._client(), self._name_of(key))
        if not 0 < answer.meta["size"] <= room:
            return None
        return await answer.bytes_async()

    async def _copy(self, data: memoryview, parts: Parts) -> None:
        if data.nbytes < _COPY_IN_THREAD:
            _fill(parts, data)
            return
        if self._copiers is None:
            self._copiers = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="kvhold-s3")
        await in_thread(self._copiers, lambda: _fill(parts, data))

    async def _put(self, key: bytes, parts: Parts) -> TierError | None:
        name, in_parts = self._name_of(key), size_of(parts) >= self._config.multipart_bytes
        async with (
            self._transfers,
            _lent(parts, self._config.part_bytes if in_parts else None) as views,
        ):
            try:
                if self._config.put_if_absent and not in_parts:
                    await obstore.put_async(
                        self._client(), name, views, mode="create", use_multipart=False
                    )
                elif not await self._is_there(name):
                    whole = obstore.put_async
                    await (
                        self._put_in_parts(name, views)
                        if in_parts
                        else whole(self._client(), name, views, use_multipart=False)
                    )
            except AlreadyExistsError as error:
                fault = self._fault(error, "put")
                return fault if is_conflict(error) else None
            except OBSTORE_FAULTS as error:
                return self._fault(error, "put")
        return None

    async def _replace(self, key: bytes, parts: Parts) -> bool | TierError:
        name = self._name_of(key)
        async with self._transfers, _lent(parts, None) as views:
            refused: str | None = ""
            for _ in range(_REPLACE_ROUNDS):
                try:
                    tag = (await obstore.head_async(self._client(), name))["e_tag"]
                    if tag is None:
                        return TierError(
                            self.traits.name,
                            "replace",
                            f"{self._place}: the store names no version of an object (ETag)",
                        )
                    # Ceph 16 takes an object's own tag only without quotes
                    is_refused = tag == refused and not tag.startswith("W/")
                    version = tag.strip('"') if is_refused else tag
                    await obstore.put_async(
                        self._client(), name, views, mode={"e_tag": version}, use_multipart=False
                    )
                except OBSTORE_FAULTS as error:
                    fault = self._fault(error, "replace")
                    if isinstance(error, PreconditionError):
                        refused = tag
                        continue
                    return False if is_missing_object(error) else fault
                return True
        return TierError(
            self.traits.name, "replace", f"{self._place}: {key.hex()} changes again and again"
        )

    async def _is_there(self, name: str) -> bool:
        try:
            await obstore.head_async(self._client(), name)
        except FileNotFoundError:
            return False
        return True

    async def _put_in_parts(self, name: str, views: list[memoryview]) -> None:
        """When cancelled, wait until obstore has removed the parts, up to `_ABORT_S`."""
        given_up: list[bool] = []

        def pieces() -> Iterator[memoryview]:
            for view in views:
                if given_up:
                    raise RuntimeError("given up")
                yield view

        upload = asyncio.ensure_future(
            obstore.put_async(
                self._client(),
                name,
                pieces(),
                use_multipart=True,
                chunk_size=self._config.part_bytes,
                max_concurrency=_PARTS_AT_ONCE,
            )
        )
        try:
            await asyncio.shield(upload)
        except asyncio.CancelledError:
            given_up.append(True)
            with suppress(asyncio.CancelledError):
                await asyncio.wait((upload,), timeout=_ABORT_S)
            if not upload.cancel() and not upload.cancelled():
                upload.exception()  # otherwise asyncio logs it
            raise

    async def _names(self, folder: str) -> AsyncIterator[str]:
        pages = obstore.list(self._client(), f"{self._root}{folder}" or None, chunk_size=1000)
        while True:
            try:
                page = await anext(pages)
            except StopAsyncIteration:
                return
            except OBSTORE_FAULTS as error:
                raise self._fault(error, "scan") from None
            for found in page:
                yield found["path"]


@asynccontextmanager
async def _lent(parts: Parts, piece_bytes: int | None) -> AsyncIterator[list[memoryview]]:
    """In pieces of `piece_bytes`; None: whole parts.

    On exit, wait for obstore's threads: releasing an exported view raises BufferError.
    """
    step = piece_bytes or max(1, size_of(parts))
    views = [view[at : at + step] for view in _flat(parts) for at in range(0, view.nbytes, step)]
    try:
        yield views
    finally:
        cancelled = False
        while not _released(views):
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


def _released(views: list[memoryview]) -> bool:
    for view in views:
        try:
            view.release()
        except BufferError:
            return False
    return True


def _flat(parts: Parts) -> list[memoryview]:
    return [part.cast("B") for part in parts if part.nbytes]


def _fill(parts: Parts, data: memoryview) -> None:
    source, at = np.frombuffer(data, np.uint8), 0
    for part in _flat(parts):
        step = min(part.nbytes, source.size - at)
        np.frombuffer(part, np.uint8)[:step] = source[at : at + step]
        at += step


async def _all(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def _raised(found: int | TierError | None) -> int | None:
    if isinstance(found, TierError):
        raise found
    return found


def _unless_all_failed(answers: list[Result]) -> list[Result]:
    if answers and all(isinstance(answer, TierUnavailable | TierDenied) for answer in answers):
        raise answers[0]  # type: ignore[misc]  # it is one of them
    return answers
