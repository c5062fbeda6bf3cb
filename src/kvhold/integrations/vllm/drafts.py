"""Track the blocks that lack the drafter's KV, so that they are not stored.

Near the drafter's maximum length, vLLM runs a pass without it. vLLM's prefix cache may give such
blocks to other requests. They are tracked until filled again, and so are later blocks, computed
from them. Scheduler's thread only.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvhold.integrations.vllm.geometry import Part, drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


class DraftLimit(NamedTuple):
    """num_tokens: with a longer request, a pass may run without the drafter
    late:       with asynchronous scheduling, a pass may begin so many tokens earlier
    """

    num_tokens: int
    late: int


def draft_limit(config: "VllmConfig") -> DraftLimit | None:
    """None: no drafter. A pass's drafts are subtracted: vLLM counts them."""
    if not drafts(config):
        return None
    speculation = config.speculative_config
    longest = speculation.draft_model_config.max_model_len or config.model_config.max_model_len
    drafts_a_pass = int(speculation.num_speculative_tokens)
    return DraftLimit(
        num_tokens=int(longest) - 2 * drafts_a_pass - 1,
        late=2 * drafts_a_pass if config.scheduler_config.async_scheduling else 0,
    )


class Undrafted:
    def __init__(self, parts: Sequence[Part], limit: DraftLimit) -> None:
        self._parts = parts
        self._limit = limit
        self._blocks: list[set[int]] = [set() for _ in parts]
        self._lacking: set[str] = set()

    def planned(self, output: "SchedulerOutput") -> None:
        spans = list(_spans(output))
        has_drafter = all(end <= self._limit.num_tokens for _, _, end in spans)
        if has_drafter and not any(self._blocks):
            self._lacking.clear()
            return
        self._lacking -= output.finished_req_ids
        begun = {new.req_id for new in output.scheduled_new_reqs}
        begun |= output.scheduled_cached_reqs.resumed_req_ids
        for request_id, start, end in spans:
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            if tables is None:
                continue
            if request_id in begun or not start:
                self._lacking.discard(request_id)
                if self._lacks_before(start, tables):
                    self._lacking.add(request_id)
            is_exact = has_drafter and request_id not in self._lacking
            if not has_drafter:
                self._lacking.add(request_id)
            begin = start if is_exact else max(0, start - self._limit.late)
            for part, known in zip(self._parts, self._blocks, strict=True):
                size = part.group.block_tokens
                # a partly filled block lacks the drafter's first KV
                first = -(-begin // size) if is_exact else begin // size
                filled = tables[part.table][first : -(-end // size)]
                known.difference_update(filled) if is_exact else known.update(filled)

    def _lacks_before(self, start: int, tables: Sequence[Sequence[int]]) -> bool:
        return any(
            not known.isdisjoint(tables[part.table][: -(-start // part.group.block_tokens)])
            for part, known in zip(self._parts, self._blocks, strict=True)
        )

    def loaded(self, block_ids: Sequence[Sequence[int]]) -> None:
        for ids, known in zip(block_ids, self._blocks, strict=True):
            known.difference_update(ids)

    def are_among(self, block_ids: Sequence[Sequence[int]]) -> bool:
        return any(
            not known.isdisjoint(ids) for ids, known in zip(block_ids, self._blocks, strict=True)
        )


def _spans(output: "SchedulerOutput") -> Iterator[tuple[str, int, int]]:
    for new in output.scheduled_new_reqs:
        yield (
            new.req_id,
            new.num_computed_tokens,
            new.num_computed_tokens + output.num_scheduled_tokens[new.req_id],
        )
    cached = output.scheduled_cached_reqs
    for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, start, start + output.num_scheduled_tokens[request_id]
