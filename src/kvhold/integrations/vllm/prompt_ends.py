"""The end of a handed-over prompt, inside a block. Without it, the engine that decodes computes
the tokens after the last whole block.

Such a block is stored whole. Behind the prompt's end it may have KV of another request, so it is
zeroed before the pass that computes its first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvhold.core.keys import ChunkNames
from kvhold.core.store_options import StoreOptions
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.request_state import RequestState, Scheduled


class PromptEnds:
    """are_handed: by this engine. Else only whole blocks are stored and loaded"""

    def __init__(
        self, geometry: Geometry, *, is_layerwise: bool, drafts: bool, keep_s: float
    ) -> None:
        self._geometry = geometry
        self._block = geometry.layout.tail_tokens
        self.are_handed = (
            geometry.whole_prompt_fits and bool(self._block) and not is_layerwise and not drafts
        )
        self._keep_s = keep_s
        self._zeroed: list[list[int]] = []

    def begin_pass(self) -> None:
        self._zeroed = [[] for _ in self._geometry.parts]

    def scheduled(
        self,
        state: RequestState,
        step: Scheduled,
        block_ids_of: Callable[[str], Sequence[list[int]]],
    ) -> None:
        """block_ids_of: a request's blocks, by part"""
        if not self.are_handed or not state.part.produces:
            return
        if step.starts:
            state.is_end_zeroed = False
        num_tokens = state.request.num_prompt_tokens
        first, end = num_tokens // self._block * self._block, step.computed_tokens + step.num_tokens
        if first < num_tokens and step.computed_tokens <= first < end:
            tables = block_ids_of(state.request.request_id)
            for part, zeroed in zip(self._geometry.parts, self._zeroed, strict=True):
                size = part.group.block_tokens
                zeroed += tables[part.table][first // size : -(-num_tokens // size)]
            state.is_end_zeroed = True

    def take(self, state: RequestState) -> ChunkNames | None:
        """None: it is stored, or cannot be. The tracker's other chunks are taken first."""
        if not state.is_end_zeroed or state.tracker is None:
            return None
        return state.tracker.take_end()

    def options_of(self, names: ChunkNames, options: StoreOptions) -> StoreOptions:
        """An end is read once, so it soon expires."""
        if not self._block or not names.tail_tokens % self._block:
            return options
        ttl_s = self._keep_s if options.ttl_s is None else min(self._keep_s, options.ttl_s)
        return replace(options, ttl_s=ttl_s)

    def take_zeroed(self) -> list[list[int]]:
        """For each part, blocks to zero before the pass."""
        zeroed, self._zeroed = self._zeroed, []
        return zeroed
