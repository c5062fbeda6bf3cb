"""Findings C1 to C9: what stopped the node, or the engines that use it.

C10 is in `test_vllm.py`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvhold.cache import open_cache
from kvhold.core.api import Hit
from kvhold.core.config import Config, NodeConfig, load_config
from kvhold.core.errors import DeadlineExceeded, KVHoldError, NodeError, ProtocolError
from kvhold.core.keys import HASH_BYTES, Namespace, Query
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient
from kvhold.node.server import Node
from kvhold.testing.cache import PLAIN, read, store
from kvhold.testing.tier import make_key
from kvhold.tiers.disk import DiskTier
from kvhold.tiers.url import parse_url
from tests.findings.both import (
    PATIENT,
    PROMPT,
    SPACE,
    WITHIN_S,
    a_client,
    a_node,
    clean_environ,
    eventually,
    num_reservations,
)


@pytest.mark.server
class TestC1:
    def test_a_late_answer_costs_no_client_its_connection_or_its_hits(self, tmp_path: Path) -> None:
        socket = tmp_path / "node.sock"
        with a_node(socket) as node, ExitStack() as engines:
            clients = [engines.enter_context(a_client(socket)) for _ in range(4)]
            store(clients[0], PROMPT)
            hits = [client.lookup(PROMPT.query()) for client in clients]
            node.suspend()  # as a command that takes longer than the clients wait
            for client in clients:
                with pytest.raises(DeadlineExceeded):
                    client.lookup(PROMPT.query(), deadline_s=0.05)
            node.resume()
            assert [can_claim(client, hit) for client, hit in zip(clients, hits, strict=True)] == [
                True
            ] * 4

    def test_a_clear_of_many_chunks_costs_no_client_its_connection(self, tmp_path: Path) -> None:
        """Of clients that wait 10 ms, and ask for as long as the clear takes."""
        socket, layout = (
            tmp_path / "node.sock",
            Layout(
                (Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8"),), tokens_per_chunk=1
            ),
        )
        space = Namespace("many", layout)
        with a_node(socket, "--ram-bytes", "128MiB"), ExitStack() as engines:
            clearing, *others = (engines.enter_context(a_client(socket)) for _ in range(5))
            clearing.register(space)
            for number in range(10):
                with clearing.reserve(
                    layout, space.prompt(np.arange(2000, dtype=np.int32) + 2000 * number).chunks()
                ) as room:
                    room.commit()
            store(clearing, PROMPT)
            hits = [client.lookup(PROMPT.query()) for client in others]
            with ThreadPoolExecutor(1) as threads:
                clear = threads.submit(clearing.clear, space.digest)
                while not clear.done():
                    for client in others:
                        with suppress(KVHoldError):
                            client.status(deadline_s=0.01)
            assert clear.result() == 20_000
            assert [can_claim(client, hit) for client, hit in zip(others, hits, strict=True)] == [
                True
            ] * 4


def can_claim(client: NodeClient, hit: Hit) -> bool:
    """Whether the client still holds what it had looked up, over the same connection."""
    try:
        loan = client.claim(hit.ticket)
    except NodeError:
        return False
    if loan is not None:
        loan.close()
        hit.close()
    return loan is not None


class TestC2:
    def test_a_kubernetes_service_called_kvhold_stops_no_engine(self) -> None:
        """The variables that each pod gets for it."""
        service = {
            "KVHOLD_SERVICE_HOST": "10.96.0.11",
            "KVHOLD_SERVICE_PORT": "6379",
            "KVHOLD_PORT": "tcp://10.96.0.11:6379",
            "KVHOLD_PORT_6379_TCP_ADDR": "10.96.0.11",
        }
        assert load_config(environ=service) == Config()


class TestC3:
    def test_a_folder_that_another_thread_makes_while_a_node_starts_can_be_entered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other thread makes its folder at the worst moment: right after the umask of the
        process was changed, if it is.
        """
        umask, folder = os.umask, tmp_path / "folder"  # noqa: TID251 - what is tested

        def changed(mask: int) -> int:
            before = umask(mask)
            folder.mkdir(exist_ok=True)
            return before

        async def start() -> None:
            node = Node(
                Config(ram_bytes=4 << 20, node=NodeConfig(socket=str(tmp_path / "node.sock")))
            )
            await node.serve(on_ready=lambda node: node.stop())

        monkeypatch.setattr(os, "umask", changed)
        asyncio.run(start())
        folder.mkdir(exist_ok=True)
        assert f"{folder.stat().st_mode & 0o700:o}" == "700"


WRITER = """
import ctypes, signal, sys
from pathlib import Path
from kvhold.testing.cache import PLAIN
from tests.findings.both import PATIENT, PROMPT, SPACE, NodeClient
client = NodeClient(Path(sys.argv[1]), PATIENT, name="writer")
client.register(SPACE)
room = client.reserve(PLAIN, PROMPT.chunks())
child = ctypes.CDLL(None).fork()  # a library's: the child keeps the socket
if child:
    print(child, flush=True)
signal.pause()
"""


@pytest.mark.server
class TestC4:
    def test_what_a_killed_engine_held_is_free_though_a_forked_child_of_it_lives(
        self, tmp_path: Path
    ) -> None:
        socket = tmp_path / "node.sock"
        command = [sys.executable, "-c", WRITER, str(socket)]
        environ = clean_environ(PYTHONPATH=os.pathsep.join(sys.path))
        with (
            a_node(socket),
            a_client(socket) as client,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as writer,
        ):
            assert writer.stdout is not None
            child = int(writer.stdout.readline())
            try:
                assert num_reservations(client) == 1
                writer.kill()
                eventually(lambda: not num_reservations(client))
                assert num_reservations(client) == 0
                assert store(client, PROMPT) == [0, 1, 2, 3], (
                    "the next engine writes what the killed one had reserved"
                )
            finally:
                writer.kill()
                os.kill(child, signal.SIGKILL)


@pytest.mark.server
class TestC5:
    def test_an_engine_takes_one_descriptor_of_a_node_that_allows_itself_as_many_as_it_may(
        self, tmp_path: Path
    ) -> None:
        socket = tmp_path / "node.sock"
        limited = ("/bin/sh", "-c", 'ulimit -S -n 128; exec "$@"', "sh")
        with a_node(socket, before=limited) as node, ExitStack() as engines:
            before = node.num_fds()
            for _ in range(20):
                engines.enter_context(NodeClient(socket, PATIENT))
            # it opens other files for a moment
            assert eventually(lambda: node.num_fds() <= before + 20)
            soft, hard = node.rlimit(psutil.RLIMIT_NOFILE)
            assert soft == hard


class TestC7:
    NUM_VALUES = 4000

    @pytest.fixture
    async def url(self, tmp_path: Path) -> str:
        """Of a disk tier with some thousand values of one byte."""
        url = f"disk://{tmp_path}/kv?direct=never&max_bytes=1GiB"
        tier = DiskTier.from_url(parse_url(url))
        for first in range(0, self.NUM_VALUES, 500):
            assert not any(
                await tier.put(
                    [(make_key(n), [memoryview(b"x")]) for n in range(first, first + 500)]
                )
            )
        await tier.close()
        return url

    async def test_the_index_of_a_disk_takes_few_bytes_a_value(self, url: str) -> None:
        tracemalloc.start()
        try:
            tier = DiskTier.from_url(parse_url(url))
            assert len([key async for key in tier.scan(b"")]) == self.NUM_VALUES
            nbytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await tier.close()
        assert nbytes // self.NUM_VALUES <= 150

    def test_a_query_of_more_keys_than_fit_is_refused(self) -> None:
        with open_cache(ram_bytes="4MiB", huge_pages="never") as cache:
            cache.register(SPACE)
            query = Query(SPACE.digest, PLAIN.fingerprint, 65_535, bytes(20 * HASH_BYTES))
            with pytest.raises(ProtocolError):
                cache.lookup(query)


@pytest.mark.server
class TestC8:
    def test_a_clear_while_a_tier_is_down_holds_after_a_restart(self, tmp_path: Path) -> None:
        socket, folder, away = tmp_path / "node.sock", tmp_path / "kv", tmp_path / "away"
        tier = ("--tier", f"disk://{folder}?direct=never&max_bytes=64MiB")
        with a_node(socket, *tier), a_client(socket) as client:
            store(client, PROMPT)
            assert client.flush(deadline_s=WITHIN_S)
        folder.rename(away)
        folder.write_text("a file where the folder is to be: the tier is down")
        with a_node(socket, *tier), a_client(socket) as client:
            client.clear()
        folder.unlink()
        away.rename(folder)
        with a_node(socket, *tier), a_client(socket) as client:
            assert read(client, PROMPT) == 0
            assert eventually(lambda: not any(folder.glob("??/*"))), (
                "the tier is back, and is cleared"
            )


PINNED_ENGINE = """
import os, sys
from kvhold.node import connect
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
client = {"connect_timeout_s": 60, "call_timeout_s": 60}
with connect(ram_bytes="4MiB", node={"socket": sys.argv[1]}, client=client) as client:
    print(client.status()["pid"])
"""


@pytest.mark.server
class TestC9:
    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
    def test_a_node_runs_on_all_cores_though_the_engine_that_starts_it_is_bound_to_one(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "node.sock"
        command = [sys.executable, "-c", PINNED_ENGINE, str(path)]
        done = subprocess.run(
            command,
            env=clean_environ(),
            capture_output=True,
            text=True,
            timeout=4 * WITHIN_S,
            check=True,
        )
        node, threads = psutil.Process(int(done.stdout)), []
        try:
            for thread in node.threads():
                with suppress(ProcessLookupError):
                    threads.append(os.sched_getaffinity(thread.id))
        finally:
            with NodeClient(path, PATIENT, name="test") as client:
                client.stop_node()
        assert threads
        assert [cores for cores in threads if not cores >= os.sched_getaffinity(0)] == []
