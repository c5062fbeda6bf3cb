"""A node that one of many busy processes has started answers all of them, on cores taken four times
over.

It needs no vLLM. It has that mark because the tests that run alone are those of that stage.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvhold.node import NodeClient
from tests.node.nodes import PATIENT, clean_environ

pytestmark = [pytest.mark.vllm, pytest.mark.alone]

A_CORE = 4  # busy processes
ROUNDS = 60
PROMPTS = 12  # all processes share them

# As an engine is: one thread computes without a pause and without the interpreter's lock, another
# one asks the cache.
BUSY = """
import hashlib, json, sys, threading
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Namespace
from kvhold.node import connect
from kvhold.testing.cache import PLAIN, a_prompt, read, store

path, number, rounds, prompts = sys.argv[1], *map(int, sys.argv[2:])
work = bytes(1 << 20)
def compute():
    while True:
        hashlib.sha256(work)
threading.Thread(target=compute, daemon=True).start()

space = Namespace(model="model", layout=PLAIN)
with connect(ram_bytes="64MiB", node={"socket": path}) as client:
    client.register(space)
    link, pid = client._link, client.status(deadline_s=60)["pid"]
    print(json.dumps({"pid": pid}), flush=True)
    sys.stdin.readline()
    counts = {"lookups": 0, "found": 0, "stored": 0}
    failed = []
    for at in range(rounds):
        prompt = a_prompt(space, 512, (at + number) % prompts)
        try:
            counts["lookups"] += 1
            if read(client, prompt):
                counts["found"] += 1
            elif store(client, prompt):
                counts["stored"] += 1
        except KVHoldError as error:
            failed.append(f"{type(error).__name__}: {error}")
    same = client._link is link
    print(json.dumps({**counts, "failed": failed, "same connection": same}), flush=True)
    sys.stdin.readline()
"""


def test_every_lookup_is_answered_and_no_connection_is_lost(tmp_path: Path) -> None:
    path, cores = tmp_path / "node.sock", len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", BUSY, str(path)]
    with ExitStack() as stack:
        busy = []
        for number in range(A_CORE * cores):
            process = subprocess.Popen(
                [*command, *map(str, (number, ROUNDS, PROMPTS))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=clean_environ(),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            busy.append(process)

        def all_say() -> list[dict[str, object]]:
            return [
                json.loads(process.stdout.readline())
                for process in busy
                if process.stdout is not None
            ]

        assert len({said["pid"] for said in all_say()}) == 1, (
            "one of them has started the node, and all have joined it"
        )
        for process in busy:
            print("go", file=process.stdin, flush=True)
        counted: Counter[str] = Counter()
        for said in all_say():
            assert said.pop("failed") == []
            assert said.pop("same connection")
            counted.update(said)
        with NodeClient(path, PATIENT, name="test") as client:
            counters = client.status()["counters"]
            client.stop_node()
    print(dict(counted))
    assert counted["lookups"] == len(busy) * ROUNDS
    assert counted["found"] > PROMPTS
    assert counted["stored"] >= PROMPTS
    assert not counters.get("kvhold_connections{result=lost}")
