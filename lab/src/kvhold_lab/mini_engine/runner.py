"""Compute a scheduler's output, in place of vLLM's model runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from kvhold_lab.mini_engine.arithmetic import choose
from kvhold_lab.mini_engine.calls import calls_of
from kvhold_lab.mini_engine.models import Model, ModelBatch, ModelKeys, ModelSpan, Slots

_QUERIES = 128

Array = npt.NDArray[np.int64]


@dataclass
class _Running:
    """blocks: by KV cache group; computed: tokens before the pass"""

    tokens: list[int]
    num_prompt: int
    blocks: list[list[int]]
    computed: int


@dataclass(frozen=True)
class _Table:
    block_tokens: int
    window: int

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) if self.window else 0


class Runner:
    def __init__(
        self,
        config: VllmConfig,
        kv_config: KVCacheConfig,
        model: Model,
        caches: dict[str, torch.Tensor],
        connector: Any = None,
        *,
        device: str = "cpu",
    ) -> None:
        self._calls = calls_of(config, connector, caches)
        self._model = model
        self._caches = caches
        self._connector = connector
        self._device = device
        self._group_of = {
            name: number
            for number, group in enumerate(kv_config.kv_cache_groups)
            for name in group.layer_names
        }
        self._tables = [
            _Table(
                group.kv_cache_spec.block_size,
                getattr(group.kv_cache_spec, "sliding_window", None) or 0,
            )
            for group in kv_config.kv_cache_groups
        ]
        self._running: dict[str, _Running] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        with self._calls.turn():
            self._calls.before_blocks(output)
            self._update(output)
            return (
                self._compute(output)
                if output.total_num_scheduled_tokens
                else self._calls.without_pass(output)
            )

    def read_kv(self, request_id: str) -> dict[str, torch.Tensor]:
        """A request's KV within the window, by layer: `[tokens, heads, elements]`.

        Valid until the request's next pass.
        """
        running, found = self._running[request_id], {}
        end = running.computed
        for name, cache in self._caches.items():
            table = self._tables[self._group_of[name]]
            at = np.arange(table.first_seen(end - 1), end)
            slots = self._slots(
                _blocks_at(running, self._group_of[name], at // table.block_tokens),
                at % table.block_tokens,
            )
            found[name] = cache[slots.blocks, :, slots.offsets].clone()
        return found

    def block_ids(self, request_id: str) -> list[list[int]]:
        return [list(ids) for ids in self._running[request_id].blocks]

    def _update(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        for cache in self._caches.values():
            if output.new_block_ids_to_zero:
                cache[self._tensor(output.new_block_ids_to_zero)] = 0
            if output.kv_cache_block_copies:
                sources, targets = self._tensor(output.kv_cache_block_copies).T
                cache[targets] = cache[sources]
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self._running[new.req_id] = _Running(
                tokens,
                len(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            running, added = self._running[request_id], cached.new_block_ids[at]
            running.computed = cached.num_computed_tokens[at]
            del running.tokens[running.num_prompt + cached.num_output_tokens[at] :]
            if request_id in cached.resumed_req_ids:
                running.blocks = [list(ids) for ids in added]
            elif added is not None:
                running.blocks = [
                    before + list(ids) for before, ids in zip(running.blocks, added, strict=True)
                ]

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        requests = [self._running[request_id] for request_id in ids]
        counts = [output.num_scheduled_tokens[request_id] for request_id in ids]
        batch = self._batch(requests, counts)
        chosen, connected = self._calls.around(
            output,
            lambda: self._model.forward(batch, self._caches, self._enter, self._leave),
            lambda logits: [int(token) for token in choose(logits).tolist()],
        )
        sampled: list[list[int]] = []
        for running, count, token in zip(requests, counts, chosen, strict=True):
            running.computed += count
            is_last = running.computed == len(running.tokens)
            sampled.append([token] if is_last else [])
            running.tokens += sampled[-1]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connected,
        )

    def _enter(self, layer: str) -> None:
        if self._connector is not None and self._connector.has_connector_metadata():
            self._connector.wait_for_layer_load(layer)

    def _leave(self, layer: str) -> None:
        if self._connector is not None and self._connector.has_connector_metadata():
            self._connector.save_kv_layer(layer, self._caches[layer], None)

    def _batch(self, requests: Sequence[_Running], counts: Sequence[int]) -> ModelBatch:
        ends = np.cumsum(counts)
        tokens = [
            token
            for one, count in zip(requests, counts, strict=True)
            for token in one.tokens[one.computed : one.computed + count]
        ]
        positions = np.concatenate(
            [
                np.arange(one.computed, one.computed + count)
                for one, count in zip(requests, counts, strict=True)
            ]
        )
        owners = np.repeat(np.arange(len(requests)), counts)
        slots = [
            self._slots(
                np.concatenate(
                    [
                        _blocks_at(one, group, positions[owners == number] // table.block_tokens)
                        for number, one in enumerate(requests)
                    ]
                ),
                positions % table.block_tokens,
            )
            for group, table in enumerate(self._tables)
        ]
        singles = np.array(
            [number for number, count in enumerate(counts) if count == 1], dtype=np.int64
        )
        spans = (
            [
                self._span(
                    [requests[number] for number in singles], ends[singles, None] - 1, positions
                )
            ]
            if singles.size
            else []
        )
        for one, count, end in zip(requests, counts, ends, strict=True):
            cuts = range(end - count, end, _QUERIES) if count > 1 else ()
            spans += [
                self._span([one], np.arange(cut, min(cut + _QUERIES, end))[None], positions)
                for cut in cuts
            ]
        return ModelBatch(
            self._tensor(tokens), self._tensor(positions), slots, spans, self._tensor(ends - 1)
        )

    def _span(self, members: Sequence[_Running], rows: Array, positions: Array) -> ModelSpan:
        """rows: `[members, queries]`; positions: of all tokens"""
        return ModelSpan(
            self._tensor(rows),
            [self._keys(members, positions[rows], group) for group in range(len(self._tables))],
        )

    def _keys(self, members: Sequence[_Running], positions: Array, group: int) -> ModelKeys:
        """positions: `[batch, queries]`."""
        table = self._tables[group]
        first = np.array([table.first_seen(position) for position in positions[:, 0]])
        most = int((positions[:, -1] + 1 - first).max())
        seen = first[:, None] + np.arange(most)  # [batch, tokens]
        mask = seen[:, None, :] <= positions[:, :, None]
        if table.window:
            mask &= seen[:, None, :] > positions[:, :, None] - table.window
        at = np.minimum(seen, positions[:, -1:])
        blocks = np.stack(
            [
                _blocks_at(one, group, row // table.block_tokens)
                for one, row in zip(members, at, strict=True)
            ]
        )
        return ModelKeys(
            self._slots(blocks, at % table.block_tokens), torch.from_numpy(mask).to(self._device)
        )

    def _slots(self, blocks: Array, offsets: Array) -> Slots:
        return Slots(self._tensor(blocks), self._tensor(offsets))

    def _tensor(self, numbers: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64)).to(self._device)


def _blocks_at(running: _Running, group: int, at: Array) -> Array:
    return np.array(running.blocks[group], dtype=np.int64)[at]
