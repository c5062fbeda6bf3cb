"""Nodes, clients and prompts for tests that run on commit 5f474b0 and on today's code alike.

`tools/check_findings.py` runs the tests of this folder on both commits. So they use only settings,
commands and calls that both have. Where the name or the arguments of one differ, a function here
hides that, and its docstring says so.

They share helpers with other tests: `tests/vllm/scheduling.py` and `tests/vllm/hands.py`,
`tests/tiers/memory.py` and `tests/cache/below.py`. At import these use only names that 5f474b0 has,
too.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvhold.core.api import ABSENT, Cache
from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import HASH_BYTES, Namespace, Prompt, make_key
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, demanded_bytes

WITHIN_S = 30.0  # only a hang, or the defect itself, takes so long
PATIENT = ClientConfig(
    connect_timeout_s=WITHIN_S,
    call_timeout_s=WITHIN_S,
    arrival_timeout_s=WITHIN_S,
    heartbeat_interval_s=WITHIN_S,
)
SPACE = Namespace(model="model", layout=PLAIN)
PROMPT = a_prompt(SPACE, 64)


def eventually(condition: Callable[[], Any]) -> Any:
    """The first true answer; the last one where none comes."""
    until = time.monotonic() + WITHIN_S
    while not (answer := condition()) and time.monotonic() < until:
        time.sleep(0.005)
    return answer


def clean_environ(**more: str) -> dict[str, str]:
    """The environment without the user's settings."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")
    } | more


@contextmanager
def a_node(socket: Path, *arguments: str, before: tuple[str, ...] = ()) -> Iterator[psutil.Process]:
    """A `kvhold serve` of 16 MiB on `socket`. before: a command that runs it."""
    command = [
        *before,
        sys.executable,
        "-m",
        "kvhold",
        "serve",
        "--socket",
        str(socket),
        "--ram-bytes",
        "16MiB",
        *arguments,
    ]
    with socket.with_suffix(".test-log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean_environ()
        )
    try:
        assert process.stdout is not None
        with process.stdout as said:
            assert "ready" in said.readline(), socket.with_suffix(".test-log").read_text()
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(WITHIN_S)
        finally:
            process.kill()
            process.wait()


@contextmanager
def a_client(socket: Path) -> Iterator[NodeClient]:
    """A client that knows the namespace of these tests."""
    with NodeClient(socket, PATIENT, name="test") as client:
        client.register(SPACE)
        yield client


def num_reservations(client: NodeClient) -> int:
    """Return how many reservations the node's clients hold. 5f474b0 calls them rooms."""
    held: dict[str, Any] = dict(client.status()["held"])
    return int(held["rooms"] if "rooms" in held else held["reservations"])


def wrong_chunks(cache: Cache, prompt: Prompt) -> list[int]:
    """The numbers of the chunks that an engine would get of a prompt with other bytes than were
    stored.

    Readers compare what they read with the checksums of what was stored, by `Loan.verify`. On
    5f474b0 there were none to compare.
    """
    with cache.lookup(prompt.query()) as hit:
        loan = cache.claim(hit.ticket) if hit.num_tokens else None
        if loan is None:
            return []
        with loan:
            try:
                if hasattr(loan, "verify"):
                    loan.verify(PLAIN)
            except KVHoldError:
                return []  # a miss
            offsets = [int(offset) for offset in loan.chunks().offsets]
            return [
                chunk
                for chunk, at in enumerate(offsets)
                if at != ABSENT and not is_right(loan.buffer, at, prompt, chunk)
            ]


def is_right(buffer: np.ndarray, at: int, prompt: Prompt, chunk: int) -> bool:
    """Whether a whole chunk of a prompt lies there, as `kvhold.testing.cache.fill` writes it."""
    names = prompt.chunks()
    nbytes = PLAIN.chunk_bytes(0, PLAIN.tokens_per_chunk)
    key = make_key(
        names.namespace, names.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES], 0, 0
    )
    return np.array_equal(buffer[at : at + nbytes], demanded_bytes(key, nbytes))


def offsets_of(cache: Cache, prompt: Prompt) -> list[int]:
    """Where the chunks of a prompt lie in the arena."""
    with cache.lookup(prompt.query()) as hit:
        loan = cache.claim(hit.ticket)
        assert loan is not None
        with loan:
            return [int(offset) for offset in loan.chunks().offsets]
