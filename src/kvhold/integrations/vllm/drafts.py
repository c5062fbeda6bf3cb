"""Track the blocks that lack the drafter's KV, so that they are not stored.

vLLM runs a pass without the drafter if one request comes near the drafter's longest text. vLLM's
prefix cache may give such blocks to other requests, so they are tracked until they are filled
again. Scheduler's thread only.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvhold.integrations.vllm.geometry import Part, drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


def draft_limit(config: "VllmConfig") -> int | None:
    """Return the request length above which a pass may have no drafter; None: no drafter.

    One pass's drafts are subtracted, because vLLM counts them.
    """
    if not drafts(config):
        return None
    speculation = config.speculative_config
    longest = speculation.draft_model_config.max_model_len or config.model_config.max_model_len
    return int(longest - 2 * speculation.num_speculative_tokens - 1)


class Undrafted:
    def __init__(self, parts: Sequence[Part], limit: int) -> None:
        self._parts = parts
        self._limit = limit
        self._blocks: list[set[int]] = [set() for _ in parts]

    def planned(self, output: "SchedulerOutput") -> None:
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
                # a partly filled block still lacks the drafter's first KV
                first = -(-start // size) if has_drafter else start // size
                filled = tables[part.table][first : -(-end // size)]
                known.difference_update(filled) if has_drafter else known.update(filled)

    def loaded(self, block_ids: Sequence[Sequence[int]]) -> None:
        for ids, known in zip(block_ids, self._blocks, strict=True):
            known.difference_update(ids)

    def are_among(self, block_ids: Sequence[Sequence[int]]) -> bool:
        return any(
            not known.isdisjoint(ids) for ids, known in zip(block_ids, self._blocks, strict=True)
        )


def _spans(output: "SchedulerOutput") -> Iterator[tuple[str, int, int]]:
    """Yield (request, first token, end) of a step."""
    for new in output.scheduled_new_reqs:
        yield (
            new.req_id,
            new.num_computed_tokens,
            new.num_computed_tokens + output.num_scheduled_tokens[new.req_id],
        )
    cached = output.scheduled_cached_reqs
    for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, start, start + output.num_scheduled_tokens[request_id]
