"""A real node, and the API of `kvhold control` before it, on loopback and on its Unix socket."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvhold.control.server import ControlServer
from kvhold.core.config import Config
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.setting import apply
from kvhold.node import NodeClient
from kvhold.testing.cache import store
from tests.node.nodes import PATIENT_S, RunningNode, clean_environ

Answered = tuple[int, Any]


class RunningControl:
    """`own` goes through the Unix socket, `tcp` through loopback."""

    def __init__(
        self, server: ControlServer, own: aiohttp.ClientSession, tcp: aiohttp.ClientSession
    ) -> None:
        self.server = server
        self._own = own
        self.tcp = tcp

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def own(self, method: str, path: str, body: Any = None) -> Answered:
        # as a file: aiohttp warns of large bytes
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        async with self._own.request(method, f"http://localhost{path}", data=data) as response:
            return response.status, await _content(response)

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answered:
        async with self.tcp.request(
            method, f"{self.url}{path}", json=body, headers=headers
        ) as response:
            return response.status, await _content(response)


def flood(client: NodeClient, space: Namespace, num_prompts: int = 40) -> None:
    """Store more than the node's memory holds."""
    for number in range(num_prompts):
        tokens = range(1_000_000 + 1000 * number, 1_000_000 + 1000 * number + 640)
        store(client, space.prompt(list(tokens)))


def tokens_of(prompt: Prompt) -> list[int]:
    return [int(token) for token in prompt.tokens]


async def _content(response: aiohttp.ClientResponse) -> Any:
    if response.content_type.endswith("json"):
        return await response.json(content_type=None)
    return await response.text()


@asynccontextmanager
async def running_control(
    node_path: Path, *, otel: Any = None, **settings: Any
) -> AsyncIterator[RunningControl]:
    """settings: of the section `control`"""
    config = apply(
        Config(),
        {
            "node": {"socket": str(node_path)},
            "control": {
                "listen": "127.0.0.1:0",
                "socket": str(node_path.with_name("control.sock")),
                "node_timeout_s": PATIENT_S,
                "history_file": str(node_path.with_name("history")),
            }
            | settings,
            "otel": otel or {},
        },
        source="test",
    )
    server = ControlServer(config)
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(on_ready=lambda _: ready.set()))
    await asyncio.wait(
        [serving, asyncio.ensure_future(ready.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    if serving.done():
        serving.result()
    timeout = aiohttp.ClientTimeout(total=PATIENT_S)
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(server.path)), timeout=timeout
            ) as own,
            aiohttp.ClientSession(timeout=timeout) as tcp,
        ):
            yield RunningControl(server, own, tcp)
    finally:
        server.stop()
        await serving


@contextmanager
def control_process(settings: Path, node: RunningNode) -> Iterator[str]:
    """`kvhold control`. Yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvhold", "control", "--config", str(settings)],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environ(KVHOLD_NODE_SOCKET=str(node.path)),
    )
    try:
        assert process.stdout is not None
        with process.stdout as said:
            ready = said.readline()
        yield ready.split()[-1]
    finally:
        process.terminate()
        process.wait(PATIENT_S)
