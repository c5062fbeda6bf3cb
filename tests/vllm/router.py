"""What a router makes of KV events: it keeps the blocks that each place holds, and believes nothing
that contradicts itself.

router = Router(); router.read(events)
router.held                  # {(group, hash)} of what kvhold holds
router.text_of(group, hash)  # the tokens up to that block's end, from the events alone
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored

Block = tuple[int, Any]  # group and hash


@dataclass(frozen=True)
class Said:
    """What a BlockStored says of one of its blocks."""

    parent: Any
    tokens: tuple[int, ...]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None
    kind: str | None
    window: int | None


class Router:
    """The blocks of the engine's own memory (`gpu`) and of kvhold's (`held`)."""

    def __init__(self) -> None:
        self.held: set[Block] = set()
        self.gpu: set[Block] = set()
        self.said: dict[Block, Said] = {}
        self.stored = self.removed = 0  # blocks of kvhold's

    def read(self, events: Iterable[Any]) -> None:
        """Events in order.

        Fails for a block stored twice, removed without having been stored, or described in two
        ways.
        """
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.gpu.clear()
                continue
            ours = event.medium == MEDIUM_CPU
            assert (event.locality == "LOCAL") == ours
            blocks = [(event.group_idx, block) for block in event.block_hashes]
            place = self.held if ours else self.gpu
            if isinstance(event, BlockRemoved):
                assert not ours or place.issuperset(blocks)
                place.difference_update(blocks)
                self.removed += ours * len(blocks)
            else:
                assert isinstance(event, BlockStored)
                assert not ours or place.isdisjoint(blocks)
                place.update(blocks)
                self.stored += ours * len(blocks)
                self._believe(event, blocks)

    def text_of(self, group: int, block: Any) -> tuple[int, ...]:
        """All tokens up to the end of a block that was stored at some time."""
        pieces: list[tuple[int, ...]] = []
        while block is not None:
            said = self.said[group, block]
            pieces.append(said.tokens)
            block = said.parent
        return tuple(token for piece in reversed(pieces) for token in piece)

    def _believe(self, event: BlockStored, blocks: list[Block]) -> None:
        size, parent = event.block_size, event.parent_block_hash
        if len(event.token_ids) != size * len(blocks):
            return  # vLLM's own, of a window whose first blocks are gone
        extras = event.extra_keys or [None] * len(blocks)
        assert len(extras) == len(blocks)
        for number, block in enumerate(blocks):
            said = Said(
                parent,
                tuple(event.token_ids[number * size : (number + 1) * size]),
                event.lora_id,
                event.lora_name,
                tuple(extras[number]) if extras[number] is not None else None,
                event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
            )
            assert self.said.setdefault(block, said) == said, "the same block, told in two ways"
            parent = block[1]
