"""Jobs: re-encodings in the node."""

import time
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import TypedDict, cast

import msgspec

from kvhold.control.node import ControlledNode
from kvhold.control.refusals import ControlRefusal
from kvhold.core.api import Reencoding
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Query

_MOST_RUNNING = 16
_MOST_KEPT = 256


class JobProgress(TypedDict):
    """Chunks so far, as in `ReencodeProgress`."""

    done: bool
    stopped: str
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
    """A job.

    number:    its number
    tier:      whose chunks are re-encoded
    codec:     their new codec
    namespace: digest of the only namespace; empty: all
    began_s:   Unix time
    progress:  chunks so far; `done` and `stopped` say how it ended
    """

    number: int
    tier: str
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


@dataclass
class _Job:
    number: int
    request: JobRequest
    reencoding: Reencoding
    began_s: float = field(default_factory=time.time)

    def refresh(self) -> "_Job":
        try:
            self.reencoding.refresh()
        except KVHoldError as error:
            self.end(f"the node is lost: {error}")
        return self

    def end(self, why: str) -> None:
        progress = self.reencoding.progress
        if not progress.done:
            self.reencoding.close()
            self.reencoding.progress = msgspec.structs.replace(progress, done=True, stopped=why)

    def row(self) -> JobRow:
        return {
            "number": self.number,
            "tier": self.request.tier,
            "codec": self.request.codec,
            "namespace": (self.request.namespace or b"").hex(),
            "began_s": self.began_s,
            "progress": cast(JobProgress, msgspec.structs.asdict(self.reencoding.progress)),
        }


class Jobs:
    """One event loop. Its end, or the node's, ends all jobs."""

    def __init__(self, node: ControlledNode) -> None:
        self._node = node
        self._numbers = count(1)
        self._jobs: dict[int, _Job] = {}

    async def begin(self, request: JobRequest) -> JobRow:
        """Raises ControlRefusal."""
        await self.rows()
        running = sum(not job.reencoding.progress.done for job in self._jobs.values())
        if running >= _MOST_RUNNING:
            raise ControlRefusal(
                HTTPStatus.TOO_MANY_REQUESTS, "busy", f"{running} jobs are running or waiting"
            )
        reencoding = await self._node.call(
            lambda client: client.reencode(
                request.tier, request.codec, namespace=request.namespace, query=request.query
            )
        )
        job = _Job(next(self._numbers), request, reencoding)
        self._jobs[job.number] = job
        self._drop_old()
        return job.row()

    async def rows(self) -> list[JobRow]:
        """The latest first."""
        running = [job for job in self._jobs.values() if not job.reencoding.progress.done]
        if running:
            await self._node.call(lambda _: [job.refresh() for job in running])
        return [job.row() for job in reversed(self._jobs.values())]

    async def row(self, number: int) -> JobRow:
        """Raises ControlRefusal."""
        job = self._find(number)
        await self._node.call(lambda _: job.refresh())
        return job.row()

    async def cancel(self, number: int) -> JobRow:
        """Finished chunks stay re-encoded. Raises ControlRefusal."""
        job = self._find(number)
        await self._node.call(lambda _: job.refresh().end("cancelled"))
        return job.row()

    def _find(self, number: int) -> _Job:
        if number not in self._jobs:
            raise ControlRefusal(HTTPStatus.NOT_FOUND, "no_job", f"there is no job {number}")
        return self._jobs[number]

    def _drop_old(self) -> None:
        ended = [job.number for job in self._jobs.values() if job.reencoding.progress.done]
        for number in ended[: max(0, len(self._jobs) - _MOST_KEPT)]:
            del self._jobs[number]
