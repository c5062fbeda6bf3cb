"""Prefill on one engine and decode on another with real KV: tokens and KV bytes are those of one
engine alone, although parameters are stale, parts are aborted and blocks are few.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold_lab.mini_engine import MiniEngine
from tests.vllm.handing import DECODER, NIXL, PREFILLER
from tests.vllm.scheduling import NodeProcess, eventually
from tests.vllm.test_mini_engine import (
    BLOCKS,
    FEW,
    MANY,
    Asked,
    compare,
    model,
    node,
    one_thread,
    start,
    traffic,
)

__all__ = ["model", "node", "one_thread", "start"]  # fixtures

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}
AT_ONCE = 8
HASTY = {"client": {"call_timeout_s": 20.0, "handover_timeout_s": 1.0, "handover_grace_s": 0.02}}


class TwoParts:
    """A proxy of the test: each request goes to a prefill and a decode engine."""

    def __init__(self, prefill: MiniEngine, decode: MiniEngine, seed: str) -> None:
        self.prefill, self.decode = prefill, decode
        self._chance = random.Random(seed)
        self._prefilling: dict[str, Asked] = {}
        self._leaving: dict[str, int] = {}
        self._steps = 0

    def serve(self, asked: list[Asked]) -> None:
        waiting = deque(asked)
        engines = (self.prefill, self.decode)
        while waiting or self._prefilling or any(engine.is_busy() for engine in engines):
            unfinished = self.decode.scheduler.get_num_unfinished_requests()
            if waiting and unfinished + len(self._prefilling) < AT_ONCE:
                self._begin(waiting.popleft())
            moved = False
            for engine in engines:
                moved |= engine.is_busy() and engine.step()
            self._steps += 1
            self._hand_over()
            for name in [name for name, step in self._leaving.items() if step == self._steps]:
                self.decode.abort(name)
            if not moved:
                self.prefill.idle()

    def _begin(self, one: Asked) -> None:
        if self._chance.random() < 0.5:
            self._add_prefill(one, NIXL)
            self._prefilling[one.name] = one
            return
        parts: list[Callable[[], None]] = [
            partial(self._add_prefill, one, DECODER),
            partial(self._add_decode, one, PREFILLER),
        ]
        self._chance.shuffle(parts)
        for part in parts[: self._chance.choice([1, 2, 2, 2])]:
            part()
        if one.name not in self.decode.outputs:
            self._add_decode(one, PREFILLER)

    def _add_prefill(self, one: Asked, params: dict[str, Any]) -> None:
        self.prefill.add(f"prefill of {one.name}", one.tokens, 1, kv_transfer_params=params)

    def _add_decode(self, one: Asked, params: dict[str, Any] | None) -> None:
        self.decode.add(one.name, one.tokens, one.max_tokens, kv_transfer_params=params)
        if one.aborted_after:
            self._leaving[one.name] = self._steps + one.aborted_after

    def _hand_over(self) -> None:
        for name, one in list(self._prefilling.items()):
            prefill = f"prefill of {name}"
            if prefill in self.prefill.scheduler.requests:
                if self._chance.random() < 0.02:
                    self.prefill.abort(prefill)
                continue
            del self._prefilling[name]
            params = self.prefill.handed.get(prefill)
            if self._chance.random() < 0.1:  # of another prompt
                params = self._chance.choice([None, *self.prefill.handed.values()])
            self._add_decode(one, params)


def test_two_engines_have_the_tokens_and_the_kv_of_one_alone(
    model: str, start: Callable[..., MiniEngine], node: NodeProcess
) -> None:
    prefill = start(model, num_blocks=BLOCKS[model], **FEW, asynchronous=True)
    decode = start(model, num_blocks=BLOCKS[model], **FEW, prefix_caching=False, settings=HASTY)
    asked = traffic("handed over", 150)
    TwoParts(prefill, decode, model).serve(asked)
    assert compare([decode], asked, start(model, connected=False, **MANY)) == []
    assert decode.counts.loaded_tokens > 1000
    assert len(prefill.handed) > 30
    eventually(lambda: node.held() == NOTHING)
