import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from kvhold.control.exposition import state_samples
from kvhold.control.history import History, HistoryAnswer
from kvhold.control.latency_history import LatenciesAnswer
from kvhold.control.node import ControlledNode
from kvhold.control.refusals import ControlRefusal
from kvhold.control.share_history import KINDS, SharesAnswer
from kvhold.core.metrics import TABLE
from kvhold.core.status import NodeStatus, check_status
from kvhold.net.messages import MetricSample
from kvhold.node import NodeClient
from kvhold.node.paths import prepare_folder

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MOST_SINCE_S = 30 * 86400.0
_SAME_S = 2.0


class Recorder:
    """One event loop, and a thread for the file."""

    def __init__(self, node: ControlledNode, path: Path, interval_s: float) -> None:
        self._node = node
        self._path = path
        self._interval_s = interval_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvhold-history")
        self._history: History | None = None
        self._runs = 0
        self._last: tuple[int, float] | None = None
        self._task: asyncio.Task[None] | None = None
        self.on_sample: Callable[[], Awaitable[object]] | None = None

    def start(self) -> None:
        """Raises ConfigError, NodeError: the file cannot be used."""
        prepare_folder(self._path, setting="control.history_file")
        self._history = History(self._path)
        self._task = asyncio.get_running_loop().create_task(self._run(self._history))

    async def jobs(self) -> list[str]:
        return await self._in_thread(lambda history: history.jobs())

    async def save_job(self, number: int, row: str) -> None:
        await self._in_thread(lambda history: history.save_job(number, row))

    async def read(self, metrics: str, since_s: str) -> HistoryAnswer:
        """metrics: names, with commas. Raises ControlRefusal."""
        names = metrics.split(",")
        if unknown := [name for name in names if name not in TABLE]:
            raise _bad(f"metrics: there is no metric {unknown[0][:40]!r}")
        seconds = _seconds(since_s)
        return await self._in_thread(lambda history: history.read(names, seconds))

    async def read_shares(self, by: str, since_s: str, tenant: str | None) -> SharesAnswer:
        """tenant: None: all. Raises ControlRefusal."""
        if by not in KINDS:
            raise _bad(f"by = {by[:20]!r}: must be one of {', '.join(KINDS)}")
        seconds = _seconds(since_s)
        return await self._in_thread(lambda history: history.read_shares(by, seconds, tenant))

    async def read_latencies(self, since_s: str) -> LatenciesAnswer:
        seconds = _seconds(since_s)
        return await self._in_thread(lambda history: history.read_latencies(seconds))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._thread.shutdown()
        if self._history is not None:
            self._history.close()

    async def _in_thread(self, work: Callable[[History], Result]) -> Result:
        history = self._history
        assert history is not None, "not started"
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(history))

    async def _run(self, history: History) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                (status, samples), shares = await self._node.call(
                    lambda client: (state_and_samples(client), client.shares())
                )
                run = self._run_of(status)
                all_samples = [*state_samples(status), *samples]
                await loop.run_in_executor(
                    self._thread, history.add, time.time(), run, all_samples, shares
                )
                if self.on_sample is not None:
                    await self.on_sample()
            except ControlRefusal as refusal:
                log.debug("no sample: %s", refusal)
            except Exception:
                log.exception("a sample was not written")
            await asyncio.sleep(self._interval_s)

    def _run_of(self, status: NodeStatus) -> str:
        """By process and start, on a clock that never jumps."""
        pid, began_s = status["pid"], time.monotonic() - status["uptime_s"]
        if self._last is None or self._last[0] != pid or abs(self._last[1] - began_s) > _SAME_S:
            self._runs += 1
            self._last = pid, began_s
        return str(self._runs)


def state_and_samples(client: NodeClient) -> tuple[NodeStatus, list[MetricSample]]:
    return check_status(client.status()), client.measure()


def _seconds(since_s: str) -> float:
    try:
        seconds = float(since_s)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= _MOST_SINCE_S:
        raise _bad(f"since_s = {since_s[:20]!r}: must be from 1 to {_MOST_SINCE_S:.0f}")
    return seconds


def _bad(detail: str) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.BAD_REQUEST, "bad_request", detail)
