import asyncio
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar, TypedDict, cast

import msgspec

from kvhold.control.node import ControlledNode
from kvhold.control.recorder import Recorder
from kvhold.control.refusals import ControlRefusal
from kvhold.core.api import Copying, Reencoding
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Query
from kvhold.node import NodeClient

_MOST_RUNNING = 16
_MOST_KEPT = 256


class JobEnd(TypedDict):
    """stopped: why early; else empty"""

    done: bool
    stopped: str


class JobProgress(JobEnd, total=False):
    """Chunks so far. A re-encoding has the fields of `ReencodeProgress`.

    copied:  of a copy: the tier has them now
    dropped: of a move: removed from the source, unless in use
    bytes:   of `copied`, in the source; to memory, there
    """

    copied: int
    dropped: int
    bytes: int
    seen: int
    replaced: int
    over_budget: int
    same: int
    kept_lossy: int
    missing: int
    bad: int
    unknown: int
    failed: int
    bytes_before: int
    bytes_after: int


class JobRow(TypedDict):
    """kind:      reencode, copy or move
    tier:      whose chunks are re-encoded, or the target of a copy
    source:    of a copy; empty: of no copy
    codec:     empty: the tier's
    namespace: the only one's digest; empty: all
    began_s:   Unix time
    progress:  chunks so far
    """

    number: int
    kind: str
    tier: str
    source: str
    codec: str
    namespace: str
    began_s: float
    progress: JobProgress


@dataclass(frozen=True)
class JobRequest:
    """namespace: digest; None: all
    query:     only the chunks of this prompt; None: all
    """

    tier: str
    codec: str
    namespace: bytes | None
    query: Query | None = None

    kind: ClassVar[str] = "reencode"
    source: ClassVar[str] = ""

    def begin(self, client: NodeClient) -> Reencoding:
        return client.reencode(self.tier, self.codec, namespace=self.namespace, query=self.query)


@dataclass(frozen=True)
class MoveRequest:
    """query: None: all chunks of the namespace"""

    tier: str
    query: Query | None
    copy: bool
    source: str
    space: bytes = b""

    codec: ClassVar[str] = ""

    @property
    def kind(self) -> str:
        return "copy" if self.copy else "move"

    @property
    def namespace(self) -> bytes:
        return self.space if self.query is None else self.query.namespace

    def begin(self, client: NodeClient) -> Copying:
        return client.copy(
            self.tier,
            self.query,
            drop=not self.copy,
            source=self.source,
            namespace=self.space,
        )


@dataclass
class _Job:
    number: int
    request: JobRequest | MoveRequest
    work: Reencoding | Copying
    began_s: float = field(default_factory=time.time)

    def refresh(self) -> "_Job":
        try:
            self.work.refresh()
        except KVHoldError as error:
            self.end(f"the node is lost: {error}")
        return self

    def end(self, why: str) -> None:
        if not self.work.progress.done:
            self.work.close()
            ended = msgspec.structs.replace(self.work.progress, done=True, stopped=why)
            self.work.progress = ended

    def row(self) -> JobRow:
        return {
            "number": self.number,
            "kind": self.request.kind,
            "tier": self.request.tier,
            "source": self.request.source,
            "codec": self.request.codec,
            "namespace": (self.request.namespace or b"").hex(),
            "began_s": self.began_s,
            "progress": cast(JobProgress, msgspec.structs.asdict(self.work.progress)),
        }


class Jobs:
    """One event loop. Its end, or the node's, ends all jobs; outcomes stay."""

    def __init__(self, node: ControlledNode, recorder: Recorder | None = None) -> None:
        self._node = node
        self._recorder = recorder
        self._jobs: dict[int, _Job] = {}
        self._earlier: dict[int, JobRow] = {}
        self._saved: set[int] = set()
        self._loading = asyncio.Lock()
        self._is_loaded = recorder is None
        self._last_number = 0
        if recorder is not None:
            recorder.on_sample = self.rows

    async def begin(self, request: JobRequest | MoveRequest) -> JobRow:
        """Raises ControlRefusal."""
        await self.rows()
        running = sum(not job.work.progress.done for job in self._jobs.values())
        if running >= _MOST_RUNNING:
            raise ControlRefusal(
                HTTPStatus.TOO_MANY_REQUESTS, "busy", f"{running} jobs are running or waiting"
            )
        work: Reencoding | Copying = await self._node.call(request.begin)
        self._last_number += 1
        job = _Job(self._last_number, request, work)
        self._jobs[job.number] = job
        await self._save(job)
        self._drop_old()
        return job.row()

    async def rows(self) -> list[JobRow]:
        """The latest first."""
        await self._load()
        running = [job for job in self._jobs.values() if not job.work.progress.done]
        if running:
            await self._node.call(lambda _: [job.refresh() for job in running])
        for job in list(self._jobs.values()):
            if job.work.progress.done and job.number not in self._saved:
                await self._save(job)
        rows = self._earlier | {job.number: job.row() for job in self._jobs.values()}
        return list(reversed(rows.values()))[:_MOST_KEPT]

    async def row(self, number: int) -> JobRow:
        """Raises ControlRefusal."""
        await self._load()
        if number in self._earlier:
            return self._earlier[number]
        job = self._find(number)
        await self._node.call(lambda _: job.refresh())
        await self._save(job)
        return job.row()

    async def cancel(self, number: int) -> JobRow:
        """Finished chunks stay as they are. Raises ControlRefusal."""
        await self._load()
        if number in self._earlier:
            return self._earlier[number]
        job = self._find(number)
        await self._node.call(lambda _: job.refresh().end("cancelled"))
        await self._save(job)
        return job.row()

    async def _load(self) -> None:
        async with self._loading:
            if self._is_loaded or self._recorder is None:
                return
            for text in await self._recorder.jobs():
                row = msgspec.convert({"source": ""} | msgspec.json.decode(text), JobRow)
                if not row["progress"]["done"]:
                    row["progress"] |= {"done": True, "stopped": "the API ended"}
                self._earlier[row["number"]] = row
            self._last_number = max(self._earlier, default=0)
            self._is_loaded = True

    async def _save(self, job: _Job) -> None:
        if self._recorder is None or job.number in self._saved:
            return
        if job.work.progress.done:
            self._saved.add(job.number)
        await self._recorder.save_job(job.number, msgspec.json.encode(job.row()).decode())

    def _find(self, number: int) -> _Job:
        if number not in self._jobs:
            raise no_job(number)
        return self._jobs[number]

    def _drop_old(self) -> None:
        ended = [job.number for job in self._jobs.values() if job.work.progress.done]
        for number in ended[: max(0, len(self._jobs) - _MOST_KEPT)]:
            del self._jobs[number]


def no_job(number: int) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.NOT_FOUND, "no_job", f"there is no job {number}")
