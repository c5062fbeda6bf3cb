"""With a node in a process of its own, and with a cache that fails at every place it can: the
tokens stay the same.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvhold.cache import LocalCache
from kvhold.core.api import Hit
from kvhold.core.config import ClientConfig, Config, NodeConfig, load_config
from kvhold.core.errors import CapacityError, DeadlineExceeded, KVHoldError, NodeError
from kvhold.core.holdings import ABSENT, Lease, Reservation
from kvhold.core.keys import ChunkNames, Namespace, Query
from kvhold.core.layout import Layout
from kvhold.core.status import HeldStatus
from kvhold.core.store_options import StoreOptions
from kvhold.integrations.transformers import Reuse
from kvhold.node import NodeClient, connect
from tests.transformers.models import prompt_of, small_chunks

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
# a busy machine waits
PATIENT = ClientConfig(
    connect_timeout_s=60, call_timeout_s=60, heartbeat_interval_s=60, reconnect_interval_s=0.02
)
REPOSITORY = Path(__file__).parent.parent.parent

STORE = """
import sys, torch
from pathlib import Path
from kvhold.core.config import ClientConfig
from kvhold.integrations.transformers import Reuse
from kvhold.node import NodeClient
from tests.transformers.models import make_model, prompt_of, small_chunks

torch.set_num_threads(1)
with NodeClient(Path(sys.argv[1]), ClientConfig(connect_timeout_s=60, call_timeout_s=60)) as cache:
    reuse = Reuse(make_model("llama"), cache, config=small_chunks())
    past = reuse.forward(prompt_of(50)).past_key_values
    assert reuse.last.num_stored == 50, reuse.last
    tensors = [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]
    torch.save(tensors, sys.argv[2])
"""


@contextmanager
def node_on(socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real node, ready; killed at the end if it still runs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")}
    command = [
        sys.executable,
        "-m",
        "kvhold",
        "serve",
        "--socket",
        str(socket),
        "--ram-bytes",
        "16MiB",
    ]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def socket() -> Iterator[Path]:
    """A short path: a Unix socket's has at most 107 bytes, and pytest's folders may be longer."""
    with tempfile.TemporaryDirectory(prefix="kvhold-") as folder:
        yield Path(folder) / "node.sock"


def held_by(cache: NodeClient) -> HeldStatus:
    return cache.status()["held"]


class TestNode:
    @pytest.mark.slow
    def test_what_one_process_stores_another_loads(
        self, llama: Any, socket: Path, tmp_path: Path
    ) -> None:
        with node_on(socket):
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
            command = [sys.executable, "-c", STORE, str(socket), str(tmp_path / "kv.pt")]
            subprocess.run(command, env=environ, cwd=tmp_path, check=True)
            with NodeClient(socket, PATIENT) as cache:
                reuse = Reuse(llama, cache, config=small_chunks())
                output = reuse.generate(prompt_of(50), return_dict_in_generate=True, **GREEDY)
                assert reuse.last.num_loaded == 49 and not reuse.last.reason
                assert held_by(cache) == {"tickets": 0, "leases": 0, "reservations": 0}
        assert torch.equal(output.sequences, llama.generate(prompt_of(50), **GREEDY))
        theirs = torch.load(tmp_path / "kv.pt")
        ours = [
            tensor
            for layer in output.past_key_values.layers
            for tensor in (layer.keys, layer.values)
        ]
        assert all(
            torch.equal(a[:, :, :49], b[:, :, :49]) for a, b in zip(ours, theirs, strict=True)
        )

    def test_a_killed_node_is_gone_on_without_and_found_again(
        self, llama: Any, socket: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        expected = llama.generate(prompt_of(50), **GREEDY)
        config = Config(node=NodeConfig(socket=str(socket), autostart=False), client=PATIENT)
        with node_on(socket) as node, connect(config) as cache:
            reuse = Reuse(llama, cache, config=small_chunks())
            for loaded in (0, 49):
                assert torch.equal(reuse.generate(prompt_of(50), **GREEDY), expected)
                assert reuse.last.num_loaded == loaded
            node.kill()
            node.wait()
            for _ in range(3):
                assert torch.equal(reuse.generate(prompt_of(50), **GREEDY), expected)
                assert reuse.last.num_loaded == 0 and "nothing is loaded" in reuse.last.reason
            with node_on(socket):
                wait_until_joined(cache)
                for loaded in (0, 49):
                    assert torch.equal(reuse.generate(prompt_of(50), **GREEDY), expected)
                    assert reuse.last.num_loaded == loaded and not reuse.last.reason

    def test_a_node_that_dies_during_the_forward_pass_costs_only_the_store(
        self, llama: Any, socket: Path
    ) -> None:
        with node_on(socket) as node, NodeClient(socket, PATIENT) as cache:
            reuse = Reuse(llama, cache, config=small_chunks())
            reuse.forward(prompt_of(40))

            def die(*_: Any) -> None:
                node.kill()
                node.wait()

            handle = llama.register_forward_pre_hook(die)
            try:
                output = reuse.generate(prompt_of(50), **GREEDY)
            finally:
                handle.remove()
            assert reuse.last.num_loaded == 32 and reuse.last.num_stored == 0
            assert "not everything is stored" in reuse.last.reason
        assert torch.equal(output, llama.generate(prompt_of(50), **GREEDY))

    def test_a_node_that_hangs_costs_its_deadline_once(self, llama: Any, socket: Path) -> None:
        with node_on(socket) as node, NodeClient(socket, PATIENT) as cache:
            reuse = Reuse(llama, cache, config=small_chunks())
            reuse.forward(prompt_of(50))
            cache._config = replace(cache._config, call_timeout_s=0.2, connect_timeout_s=0.5)
            os.kill(node.pid, signal.SIGSTOP)
            reasons = []
            for _ in range(2):
                assert torch.equal(
                    reuse.generate(prompt_of(50), **GREEDY), llama.generate(prompt_of(50), **GREEDY)
                )
                reasons.append(reuse.last.reason)
            assert "no answer within 0.2 s" in reasons[0]
            assert "not waiting for it again" in reasons[1]


def wait_until_joined(cache: NodeClient, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not cache.connected:
        assert time.monotonic() < until, "the node was not joined again"
        time.sleep(0.01)


class Failing:
    """A cache that fails at one call. Meets `core.api.Cache` as far as it is used."""

    def __init__(self, cache: LocalCache, operation: str, error: Exception | None) -> None:
        self._cache, self._operation, self._error = cache, operation, error
        self.num_reserved = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def register(self, namespace: Namespace) -> None:
        self._fail("register")
        self._cache.register(namespace)

    def lookup(self, query: Query, **options: Any) -> Hit:
        self._fail("lookup")
        return self._cache.lookup(query, **options)

    def claim(self, ticket: int) -> Lease | None:
        if self._operation == "claim" and self._error is None:
            return None
        self._fail("claim")
        lease = self._cache.claim(ticket)
        if self._operation == "lease" and lease is not None:
            lease._offsets = lease._offsets + (1 << 40)
        if self._operation == "gap" and lease is not None:
            lease._offsets = np.where(
                np.arange(lease._offsets.shape[-1]) == 1, ABSENT, lease._offsets
            )
        return lease

    def reserve(
        self, layout: Layout, names: ChunkNames, *, store_options: StoreOptions
    ) -> Reservation:
        self.num_reserved += 1
        self._fail("reserve")
        reservation = self._cache.reserve(layout, names, store_options=store_options)
        if self._operation == "partial":
            reservation._offsets = np.where(
                np.arange(len(names)) == 1, ABSENT, reservation._offsets
            )
        if self._operation == "commit":

            def commit(*_: object) -> Any:
                self._fail("commit")

            reservation._commit = commit
        return reservation

    def _fail(self, operation: str) -> None:
        if operation == self._operation and self._error is not None:
            raise self._error


LOST = NodeError("lost the node")
LATE = DeadlineExceeded("lookup", 1.0)


class TestFailingCache:
    @pytest.mark.parametrize(
        ("operation", "error"),
        [
            pytest.param("register", LOST, id="at register"),
            pytest.param("lookup", LATE, id="a late lookup"),
            pytest.param("claim", LOST, id="at claim"),
            pytest.param("claim", None, id="a hit that is gone"),
            pytest.param("lease", None, id="a lease that points outside the arena"),
            pytest.param("gap", None, id="a lease without one of its chunks"),
        ],
    )
    def test_while_loading_costs_only_the_hit(
        self,
        llama: Any,
        cache: LocalCache,
        caplog: pytest.LogCaptureFixture,
        operation: str,
        error: Exception | None,
    ) -> None:
        batch = prompt_of(50, rows=2)
        Reuse(llama, cache, config=small_chunks()).forward(batch)
        failing: Any = Failing(cache, operation, error)
        reuse = Reuse(llama, failing, config=small_chunks())
        with caplog.at_level(logging.WARNING, logger="kvhold"):
            for _ in range(3):
                assert torch.equal(reuse.generate(batch, **GREEDY), llama.generate(batch, **GREEDY))
                assert reuse.last.num_loaded == 0 and "nothing is loaded" in reuse.last.reason
        assert failing.num_reserved == 0  # a cache in trouble is not asked twice
        assert sum(record.name.startswith("kvhold") for record in caplog.records) == 1
        failing._operation = ""
        assert torch.equal(reuse.generate(batch, **GREEDY), llama.generate(batch, **GREEDY))
        assert reuse.last.num_loaded == 98 and not reuse.last.reason

    @pytest.mark.parametrize(
        ("operation", "error"),
        [
            pytest.param("reserve", LOST, id="at reserve"),
            pytest.param("reserve", CapacityError("full"), id="no room"),
            pytest.param("commit", LATE, id="a late commit"),
        ],
    )
    def test_while_storing_leaves_nothing_behind(
        self, llama: Any, cache: LocalCache, operation: str, error: KVHoldError
    ) -> None:
        failing: Any = Failing(cache, operation, error)
        reuse = Reuse(llama, failing, config=small_chunks())
        for _ in range(2):
            assert torch.equal(
                reuse.generate(prompt_of(50), **GREEDY), llama.generate(prompt_of(50), **GREEDY)
            )
            assert (
                reuse.last.num_stored == reuse.last.num_loaded == 0
                and str(error) in reuse.last.reason
            )
        assert cache.status()["used_bytes"] == 0

    def test_a_room_for_some_chunks_is_filled_as_far_as_it_goes(
        self, llama: Any, cache: LocalCache
    ) -> None:
        failing: Any = Failing(cache, "partial", None)
        reuse = Reuse(llama, failing, config=small_chunks())
        reuse.forward(prompt_of(50))
        assert reuse.last.num_stored == 34  # chunks 0 and 2 and the tail
        failing._operation = ""
        stored = reuse.forward(prompt_of(50))
        assert reuse.last.num_loaded == 16 and reuse.last.num_stored == 16
        loaded = reuse.forward(prompt_of(50))
        assert reuse.last.num_loaded == 49
        assert torch.equal(
            loaded.past_key_values.layers[0].keys[:, :, :49],
            stored.past_key_values.layers[0].keys[:, :, :49],
        )

    def test_damaged_memory_costs_only_the_hit(self, llama: Any, cache: LocalCache) -> None:
        reuse = Reuse(llama, cache, config=small_chunks())
        reuse.forward(prompt_of(50))
        for entry in cache._state.ram.entries():
            cache._arena.view(entry.offset, 1)[0] ^= 4
        assert torch.equal(
            reuse.generate(prompt_of(50), **GREEDY), llama.generate(prompt_of(50), **GREEDY)
        )
        assert reuse.last.num_loaded == 0 and "not those that were stored" in reuse.last.reason
        reuse.forward(prompt_of(50))
        assert torch.equal(
            reuse.generate(prompt_of(50), **GREEDY), llama.generate(prompt_of(50), **GREEDY)
        )
        assert reuse.last.num_loaded == 49

    def test_a_closed_cache_is_gone_on_without(self, llama: Any, cache: LocalCache) -> None:
        closed = LocalCache(load_config({"ram_bytes": "2MiB"}, environ={}))
        reuse = Reuse(llama, closed, config=small_chunks())
        reuse.forward(prompt_of(50))
        closed.close()
        assert torch.equal(
            reuse.generate(prompt_of(50), **GREEDY), llama.generate(prompt_of(50), **GREEDY)
        )
        assert "closed" in reuse.last.reason
