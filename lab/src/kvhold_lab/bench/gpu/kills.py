"""Kills processes while they copy: no byte may reach memory that is reserved again.

A control must be found.

    python -m kvhold_lab.bench.gpu.kills SOCKET KIND NUMBER [astray]   # a child; prints "copying"
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch

from kvhold.core.config import ClientConfig
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.memory.copier import Piece
from kvhold.memory.views import opaque_blocks
from kvhold.node import NodeClient
from kvhold_lab.bench.gpu.rows import GpuRow, check
from kvhold_lab.bench.gpu.target import Kind, Target
from kvhold_lab.bench.servers import running_node

PART = "kills"
_THEIRS, _OURS = 0xEE, 0x11
_CHUNKS, _BLOCK_TOKENS, _LAYERS, _BLOCK_BYTES = 4, 16, 8, 256 << 10
_PATIENCE_S = 120.0
_LINGER_S = 0.1
GROUP = Group(
    layers=_LAYERS,
    planes=2,
    heads=1,
    head_dim=8,
    dtype="int8",
    packing="kills",
    block_tokens=_BLOCK_TOKENS,
    block_bytes=_BLOCK_BYTES,
)
SPACE = Namespace(
    model="kills", layout=Layout((GROUP,), tokens_per_chunk=_BLOCK_TOKENS, tail_tokens=0)
)


def rows(target: Target) -> Iterator[GpuRow]:
    at_once, times = (1, 1) if target.small else (8, 13)
    stray = 0
    with running_node(ram_bytes=at_once * _CHUNKS * _LAYERS * _BLOCK_BYTES + (8 << 20)) as client:
        client.register(SPACE)
        for number in range(times):
            _kill_some(client, target, first=number * at_once, count=at_once)
            stray += _stray_bytes(client)
            client.clear()
        found = _bytes_astray(client, target, number=at_once * times)
    yield check(
        PART,
        f"control: copies into memory that was given back are found ({found} bytes)",
        found > 0,
    )
    yield check(
        PART,
        f"no stray byte after a SIGKILL in the middle of a copy ({stray} were found)",
        stray == 0,
        at_once * times,
    )


def _kill_some(client: NodeClient, target: Target, *, first: int, count: int) -> None:
    with _copying(client, target, range(first, first + count)) as children:
        for child in children:
            time.sleep(random.random() * 0.02)
            child.kill()
    _wait_for_memory(client)


def _bytes_astray(client: NodeClient, target: Target, *, number: int) -> int:
    with _copying(client, target, [number], "astray"):
        _wait_for_memory(client)
        return _stray_bytes(client)


@contextmanager
def _copying(
    client: NodeClient, target: Target, numbers: Sequence[int], *how: str
) -> "Iterator[list[subprocess.Popen[str]]]":
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __spec__.name, str(client.path), target.kind]
    children = [
        subprocess.Popen(
            [*command, str(number), *how], stdout=subprocess.PIPE, text=True, env=environ
        )
        for number in numbers
    ]
    try:
        for child in children:
            assert child.stdout is not None
            said = child.stdout.readline()
            if said != "copying\n":
                raise RuntimeError(f"a child said {said!r}, not that it copies")
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def _wait_for_memory(client: NodeClient) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while client.status()["held"]["reservations"]:
        if time.monotonic() > until_s:
            raise TimeoutError("the node did not get the memory of its clients back")
        time.sleep(0.001)


def _stray_bytes(client: NodeClient) -> int:
    tokens = np.arange(
        _BLOCK_TOKENS * (client.status()["arena_bytes"] // (_LAYERS * _BLOCK_BYTES)), dtype=np.int32
    )
    with client.reserve(SPACE.layout, SPACE.prompt(tokens).chunks()) as reservation:
        places = [int(offset) for offset in reservation.chunks().offsets if offset >= 0]
        assert places, "the memory that was given back can be reserved"
        for place in places:
            reservation.buffer[place : place + _LAYERS * _BLOCK_BYTES] = _OURS
        time.sleep(_LINGER_S)
        return sum(
            int(
                np.count_nonzero(
                    reservation.buffer[place : place + _LAYERS * _BLOCK_BYTES] != _OURS
                )
            )
            for place in places
        )


def copy_until_killed(socket: Path, kind: Kind, number: int, *, astray: bool = False) -> None:
    """A child's entry point. The memory is never committed.

    astray: copy into returned memory
    """
    target = Target(kind)
    blocks = [
        torch.full((_CHUNKS, _BLOCK_BYTES), _THEIRS, dtype=torch.uint8, device=target.device)
        for _ in range(_LAYERS)
    ]
    view = opaque_blocks(GROUP, blocks, block_axis=0)
    with NodeClient(socket, ClientConfig(), name="kills") as client:
        client.register(SPACE)
        mappings = client.map_for_device()
        prompt = SPACE.prompt(
            np.arange(_CHUNKS * _BLOCK_TOKENS, dtype=np.int32) + 1_000_000 * (1 + number)
        )
        with client.reserve(SPACE.layout, prompt.chunks()) as reservation:
            copier = target.copier(*mappings)
            piece = Piece(view, np.arange(_CHUNKS), reservation.buffer, reservation.chunks())
            copier.gather([piece], after=copier.mark()).wait()
            if astray:
                reservation.close()
            sys.stdout.write("copying\n")
            sys.stdout.flush()
            until_s = time.monotonic() + _PATIENCE_S
            while time.monotonic() < until_s:
                copier.gather([piece], after=copier.mark()).wait()


if __name__ == "__main__":
    copy_until_killed(
        Path(sys.argv[1]), cast(Kind, sys.argv[2]), int(sys.argv[3]), astray=len(sys.argv) > 4
    )
