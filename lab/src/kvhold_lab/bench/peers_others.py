"""The same bytes by other systems: Mooncake Store, and LMCache's P2P or its error."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvhold_lab.bench.compare_engines.lmcache_env import environment_folder
from kvhold_lab.bench.limits import RawSocket
from kvhold_lab.bench.peers_nodes import GET_CHUNKS, chunk_bytes, large
from kvhold_lab.bench.peers_rows import PeersRow, PeersSizes, peers_row
from kvhold_lab.bench.rows import in_turn
from kvhold_lab.servers.base import NotInstalled, free_port
from kvhold_lab.servers.mooncake import MooncakeMaster

_ROOM_BYTES = 64 << 20
_BUFFER_BYTES = 16 << 20
_NO_GOAL = "another system"
_START_S = 120.0
_SHOWN_LETTERS = 200
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "PYTHONPATH": ""}


def mooncake_row(sizes: PeersSizes) -> PeersRow:
    """Its client reads all chunks in one call from another process's memory, by TCP."""
    nbytes = chunk_bytes(large(sizes.layers))
    name = f"get of {GET_CHUNKS} chunks of {nbytes >> 10:,} KiB from Mooncake Store"
    memory = np.frombuffer(os.urandom(GET_CHUNKS * nbytes), np.uint8).copy()
    into = [memory[at : at + nbytes].data for at in range(0, memory.nbytes, nbytes)]
    keys = [f"bench/{number}" for number in range(GET_CHUNKS)]
    pointers = [memory.ctypes.data + at for at in range(0, memory.nbytes, nbytes)]
    lengths = [nbytes] * GET_CHUNKS
    try:
        with (
            MooncakeMaster() as master,
            _lender(master.port, memory.nbytes + _ROOM_BYTES),
            _client(master.port, 0) as client,
            RawSocket(into, receive=False) as bare,
        ):
            assert client.register_buffer(memory.ctypes.data, memory.nbytes) == 0
            codes = client.batch_put_from(keys, pointers, lengths)
            assert set(codes) == {0}, f"Mooncake Store stored nothing: {codes}"
            stored = memory.copy()

            def get() -> None:
                codes = client.batch_get_into(keys, pointers, lengths)
                assert codes == lengths, f"Mooncake Store read nothing: {codes}"

            memory[:] = 0
            get()
            assert np.array_equal(memory, stored), "Mooncake Store returned other bytes"
            seconds = in_turn({"get": get, "TCP": lambda: bare.receive(into)}, rounds=sizes.rounds)
            client.unregister_buffer(memory.ctypes.data)
    except NotInstalled as error:
        return _failed_row(name, str(error))
    return peers_row(
        f"{name}; limit: bare TCP",
        memory.nbytes / seconds["get"] / 1e9,
        "GB/s",
        memory.nbytes / seconds["TCP"] / 1e9,
        _NO_GOAL,
    )


def lmcache_row() -> PeersRow:
    """Start its server with P2P; its error is the row's name, and the value is 0."""
    name = f"get of {GET_CHUNKS} chunks by LMCache's P2P"
    program = environment_folder() / "bin" / "lmcache"
    if not program.exists():
        return _failed_row(name, f"no {program}: kvhold bench compare-engines makes it")
    advertised, coordinator = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [
        *(str(program), "server", "--host", "127.0.0.1", "--port", str(free_port())),
        *("--http-port", str(free_port()), "--supported-transfer-mode", "engine_driven"),
        *("--shm-name", f"kvhold_peers_{os.getpid()}", "--l1-size-gb", "0.25"),
        *("--eviction-policy", "LRU", "--p2p-advertise-url", advertised),
        *("--coordinator-url", f"http://{coordinator}"),
    ]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **_QUIET},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed_row(name, "its server runs; a get is not measured here")
    errors = [line for line in ended.stdout.splitlines() if "Error: " in line]
    return _failed_row(name, errors[-1] if errors else f"exit code {ended.returncode}")


def lend(port: int, nbytes: int) -> None:
    with _client(port, nbytes):
        print("ready", flush=True)
        sys.stdin.read()


@contextmanager
def _lender(port: int, nbytes: int) -> Iterator[None]:
    code = f"from kvhold_lab.bench import peers_others; peers_others.lend({port}, {nbytes})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            while (line := process.stdout.readline()).strip() != "ready":
                assert line, "the lender of Mooncake Store's memory did not start"
            yield
        finally:
            process.kill()


@contextmanager
def _client(port: int, lent_bytes: int) -> Iterator[Any]:
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    master = f"127.0.0.1:{port}"
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", lent_bytes, _BUFFER_BYTES, "tcp", "", master)
    assert code == 0, f"Mooncake Store's client did not start: {code}"
    try:
        yield client
    finally:
        client.close()


def _failed_row(name: str, error: str) -> PeersRow:
    return peers_row(f"{name}: {error[:_SHOWN_LETTERS]}", 0.0, "GB/s", 1.0, _NO_GOAL)
