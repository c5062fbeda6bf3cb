"""Track the blocks that lack the drafter's KV, so that they are not stored.

    undrafted = Undrafted(geometry.parts, draft_limit(vllm_config))
    undrafted.planned(scheduler_output)         # each step, before its stores are made
    undrafted.loaded(block_ids)                 # blocks that a load is to fill
    undrafted.are_among(block_ids)

vLLM computes a pass without the drafter if one of its requests comes near the drafter's longest
text. The pass writes the model's KV into all requests' blocks, and no drafter's KV. Such blocks may
stay in vLLM's prefix cache, and other requests may use them. So their numbers are kept until a pass
or a load fills the blocks again. Scheduler's thread only.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvhold.integrations.vllm.geometry import Part, drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


def draft_limit(config: "VllmConfig") -> int | None:
    """Return the request length above which a pass may have no drafter; None: no drafter.

    It is vLLM's own bound less the drafts of one pass, because vLLM counts the drafts that may be
    accepted.
    """
    if not drafts(config):
        return None
    speculation = config.speculative_config
    longest = speculation.draft_model_config.max_model_len or config.model_config.max_model_len
    return int(longest - 2 * speculation.num_speculative_tokens - 1)


class Undrafted:
    """The numbers of the blocks without the drafter's KV, by KV cache group."""

    def __init__(self, parts: Sequence[Part], limit: int) -> None:
        """limit: see `draft_limit`"""
        self._parts = parts
        self._limit = limit
        self._blocks: list[set[int]] = [set() for _ in parts]

    def planned(self, output: "SchedulerOutput") -> None:
        """Record the blocks that a scheduled step fills, with or without the drafter's KV."""
        spans = list(_spans(output))
        has_drafter = all(end <= self._limit for _, _, end in spans)
        if has_drafter and not any(self._blocks):
            return
        for request_id, start, end in spans:
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            if tables is None:
                continue
            for part, known in zip(self._parts, self._blocks, strict=True):
                size = part.group.block_tokens
                # with the drafter, a block that was begun before still lacks its first tokens' KV
                first = -(-start // size) if has_drafter else start // size
                filled = tables[part.table][first : -(-end // size)]
                known.difference_update(filled) if has_drafter else known.update(filled)

    def loaded(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Record that a load fills these blocks of each part. If it fails, a pass computes them."""
        for ids, known in zip(block_ids, self._blocks, strict=True):
            known.difference_update(ids)

    def are_among(self, block_ids: Sequence[Sequence[int]]) -> bool:
        """Whether any of these blocks lacks the drafter's KV."""
        return any(
            not known.isdisjoint(ids) for ids, known in zip(block_ids, self._blocks, strict=True)
        )


def _spans(output: "SchedulerOutput") -> Iterator[tuple[str, int, int]]:
    """Yield each request of a step, its first computed token, and the token after its last."""
    for new in output.scheduled_new_reqs:
        yield (
            new.req_id,
            new.num_computed_tokens,
            new.num_computed_tokens + output.num_scheduled_tokens[new.req_id],
        )
    cached = output.scheduled_cached_reqs
    for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, start, start + output.num_scheduled_tokens[request_id]
