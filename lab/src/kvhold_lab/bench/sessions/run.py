"""Sessions of agents in the mini engine, without a prefix cache, and other traffic at the node."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvhold.core.config import ClientConfig
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace
from kvhold.core.layout import Group, Layout
from kvhold.memory.slab import SLAB_BYTES, size_class
from kvhold.node import NodeClient
from kvhold_lab.bench.servers import serving
from kvhold_lab.bench.sessions.workload import OUTPUT, VOCAB, Agents
from kvhold_lab.mini_engine import MiniEngine
from kvhold_lab.mini_engine.config import ModelShape

ARMS = NO_HINTS, RETAIN, SESSIONS = "no hints", "retain", "sessions"
GOAL = 0.96
_TTL_S = 3600
_SHAPE = ModelShape(
    "LlamaForCausalLM",
    "llama",
    layers="f",
    vocab=VOCAB,
    hidden=32,
    intermediate=64,
    heads=2,
    kv_heads=2,
    head=64,
)
_CHUNK, _BLOCK, _MOST_TOKENS = 32, 16, 8192
_TOKEN_BYTES = len(_SHAPE.layers) * 2 * _SHAPE.kv_heads * _SHAPE.head * 4
_CHUNK_BYTES = size_class(_CHUNK * _TOKEN_BYTES)
_HINTS_SHARE = 0.75  # of memory
_STEP = 0.05
_AMPLE_BYTES = 1 << 30
_PATIENT = ClientConfig(call_timeout_s=60.0)


@dataclass(frozen=True)
class SessionsRow:
    """possible_tokens: of the prompts, in an earlier request of the session or of its parent;
                     `hit_ratio` is the found share of them
    refused_hints:   rejected or clipped
    is_right:        the answers are those of the first row
    ok:              `hit_ratio` reaches the goal
    """

    arm: str
    ram_bytes: int
    turns: int
    prompt_tokens: int
    possible_tokens: int
    hit_tokens: int
    hit_ratio: float
    peak_retained_bytes: int
    refused_hints: int
    ttft_p50_s: float
    is_right: bool
    ok: bool


@dataclass(frozen=True)
class SessionsSizes:
    agents: int = 9
    turns: int = 43
    other_bytes: int = 24 << 20


def rows(sizes: SessionsSizes) -> Iterator[SessionsRow]:
    """`retain` in steps of 5 % to the least memory that reaches the goal; then the other arms with
    this memory, and all with half.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvhold-sessions-") as scratch:
        measured = _Measured(Path(scratch), sizes)
        row = measured.row(RETAIN, _AMPLE_BYTES)
        yield row
        step_bytes = _STEP * row.peak_retained_bytes / _HINTS_SHARE
        steps = round(1 / _STEP)
        row = measured.row(RETAIN, _round(steps * step_bytes))
        yield row
        step = -1 if row.ok else 1
        while row.ok == (step < 0) and steps > 1:
            steps += step
            row = measured.row(RETAIN, _round(steps * step_bytes))
            yield row
        needed = _round((steps if row.ok else steps + 1) * step_bytes)
        for arm, ram_bytes in (
            (NO_HINTS, needed),
            (SESSIONS, needed),
            *((arm, _round(needed / 2)) for arm in ARMS),
        ):
            yield measured.row(arm, ram_bytes)


class _Measured:
    def __init__(self, folder: Path, sizes: SessionsSizes) -> None:
        self._folder = folder
        self._sizes = sizes
        self._outputs: dict[str, list[int]] = {}

    def row(self, arm: str, ram_bytes: int) -> SessionsRow:
        row, outputs = measure(arm, ram_bytes, self._sizes, self._folder)
        self._outputs = self._outputs or outputs
        return replace(row, is_right=outputs == self._outputs)


def measure(
    arm: str, ram_bytes: int, sizes: SessionsSizes, folder: Path
) -> tuple[SessionsRow, dict[str, list[int]]]:
    settings, socket = folder / "kvhold.toml", folder / "node.sock"
    settings.write_text(
        f'huge_pages = "never"\n[hints]\nmax_bytes = {int(ram_bytes * _HINTS_SHARE)}\n'
    )
    with (
        serving(["--config", str(settings), "--socket", str(socket)], ram_bytes=ram_bytes),
        NodeClient(socket, _PATIENT, name="other traffic") as client,
    ):
        engine = _engine(socket, folder / "model")
        try:
            return _run(arm, ram_bytes, sizes, engine, client), engine.outputs
        finally:
            engine.close()


def _engine(socket: Path, model: Path) -> MiniEngine:
    return MiniEngine(
        shape=_SHAPE,
        folder=model,
        connector={
            "tokens_per_chunk": _CHUNK,
            "save_decode": True,
            "node": {"socket": str(socket), "autostart": False},
            "client": {"call_timeout_s": 60.0},
            "rules": {"plan": False},
            "hints": {"actions": "retain", "sessions": True},
        },
        block_tokens=_BLOCK,
        num_blocks=3000,
        budget=2048,
        max_running=32,
        max_tokens=_MOST_TOKENS,
        prefix_caching=False,
    )


def _run(
    arm: str, ram_bytes: int, sizes: SessionsSizes, engine: MiniEngine, client: NodeClient
) -> SessionsRow:
    agents, others = Agents(sizes.agents, sizes.turns), _OtherTraffic(client)
    prompt_tokens = possible = hits = refused = peak_chunks = 0
    while not agents.are_over:
        acting = agents.acting()
        for _, turn in acting:
            engine.add(
                turn.name,
                turn.prompt,
                OUTPUT,
                kv_transfer_params=_hints(arm, turn.session, ends=turn.is_last),
            )
        engine.run()
        for agent, turn in acting:
            agent.answered(turn, list(engine.outputs[turn.name]))
            prompt_tokens += len(turn.prompt)
            possible += turn.possible
            hits += min(turn.possible, engine.loaded_tokens[turn.name])
            answers = engine.handed.get(turn.name, {}).get("kvhold_hints", [])
            refused += sum(one["outcome"] in ("rejected", "clipped") for one in answers)
        peak_chunks = max(peak_chunks, client.status()["retained_chunks"])
        others.store(sizes.other_bytes)
    hit_ratio = hits / possible
    return SessionsRow(
        arm=arm,
        ram_bytes=ram_bytes,
        turns=len(engine.outputs),
        prompt_tokens=prompt_tokens,
        possible_tokens=possible,
        hit_tokens=hits,
        hit_ratio=round(hit_ratio, 4),
        peak_retained_bytes=peak_chunks * _CHUNK_BYTES,
        refused_hints=refused,
        ttft_p50_s=round(median(engine.first_token_s.values()), 4),
        is_right=True,
        ok=hit_ratio >= GOAL,
    )


def _hints(arm: str, session: str, *, ends: bool) -> dict[str, Any] | None:
    retain = {"action": "retain", "ttl_s": _TTL_S}
    if arm == NO_HINTS:
        return None
    if arm == RETAIN:
        return {"kvhold": {"hints": [retain]}}
    hints = [retain | {"until": "superseded"}]
    return {"kvhold": {"session_id": session, "end_session": ends, "hints": hints}}


class _OtherTraffic:
    _AT_ONCE = 100

    def __init__(self, client: NodeClient) -> None:
        group = Group(layers=1, planes=1, heads=1, head_dim=_TOKEN_BYTES, dtype="uint8")
        self._layout = Layout(groups=(group,), tokens_per_chunk=_CHUNK)
        self._space = Namespace("other traffic", self._layout)
        self._client = client
        client.register(self._space)

    def store(self, nbytes: int) -> None:
        for _ in range(nbytes // _CHUNK_BYTES // self._AT_ONCE):
            names = ChunkNames(self._space.digest, os.urandom(self._AT_ONCE * HASH_BYTES))
            with self._client.reserve(self._layout, names) as reserved:
                reserved.commit()


def _round(nbytes: float) -> int:
    return max(1, round(nbytes / SLAB_BYTES)) * SLAB_BYTES
