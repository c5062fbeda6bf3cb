"""Calls of the node in threads, within a limit."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from kvhold.control.refusals import ControlRefusal
from kvhold.core.config import ClientConfig
from kvhold.core.errors import DeadlineExceeded, NodeError
from kvhold.node import NodeClient
from kvhold.node.namespaces import NoSuchNamespace

Result = TypeVar("Result")

_NAME = "kvhold control"


class ControlledNode:
    def __init__(self, path: Path, config: ClientConfig, max_running: int) -> None:
        self.path = path
        self._config = config
        self._client: NodeClient | None = None
        self._joining = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(max_running, thread_name_prefix="kvhold-control")
        self._most_calls = 2 * max_running
        self._num_calls = 0

    @property
    def lost_at_s(self) -> float | None:
        """Monotonic; None: never."""
        return None if self._client is None else self._client.lost_at_s

    async def call(self, work: Callable[[NodeClient], Result]) -> Result:
        """Raises ControlRefusal: no node, no answer in time, too many calls, or it refuses."""
        if self._num_calls >= self._most_calls:
            raise ControlRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "busy",
                f"{self._num_calls} requests wait for the node already (control.max_running)",
            )
        self._num_calls += 1
        try:
            return await self._in_thread(lambda: work(self._joined()))
        except DeadlineExceeded:
            raise ControlRefusal(
                HTTPStatus.GATEWAY_TIMEOUT,
                "late",
                f"the node did not answer within {self._config.call_timeout_s:g} s "
                "(control.node_timeout_s)",
            ) from None
        except NodeError as error:
            raise self._refusal(error) from None
        finally:
            self._num_calls -= 1

    async def close(self) -> None:
        await self._in_thread(self._close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _close(self) -> None:
        with self._joining:
            self._closed = True
            if self._client is not None:
                self._client.close()

    def _joined(self) -> NodeClient:
        with self._joining:
            if self._closed:
                raise NodeError("the API ends")
            if self._client is None:
                self._client = NodeClient(self.path, self._config, name=_NAME)
            return self._client

    def _refusal(self, error: NodeError) -> ControlRefusal:
        if isinstance(error, NoSuchNamespace):
            return ControlRefusal(HTTPStatus.NOT_FOUND, "no_namespace", str(error))
        client = self._client
        if client is None or not client.connected:
            return ControlRefusal(HTTPStatus.SERVICE_UNAVAILABLE, "no_node", str(error))
        return ControlRefusal(HTTPStatus.CONFLICT, "refused", str(error))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
