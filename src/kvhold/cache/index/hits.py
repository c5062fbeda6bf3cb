"""Full attention needs all chunks, sliding attention those of the last `window` tokens, a state
group the last chunk only. Pure.
"""

from collections.abc import Callable, Sequence

from kvhold.cache.chores import Turns
from kvhold.core.layout import Group, Layout

# (group, number of chunk or tail) -> every shard has it
Present = Callable[[int, int], bool]


def longest_hit_turns(
    layout: Layout,
    reach: int,
    num_whole: int,
    tail_lengths: Sequence[int],
    has_chunk: Present,
    has_tail: Present,
    *,
    units: int = 1,
) -> Turns[tuple[int, int | None]]:
    """Return `(whole chunks, index of the tail or None)`.

    reach:     whole chunks that all full-attention groups have
    num_whole: the prompt's whole chunks
    has_chunk: for other groups only
    """
    others = [g for g, group in enumerate(layout.groups) if group.attention != "full"]

    def first_gap(tokens: int) -> Turns[int | None]:
        gap: int | None = None
        for g in others:
            for i in needed_chunks(layout, g, tokens):
                if i >= num_whole or (gap is not None and i >= gap):
                    break
                yield units
                if not has_chunk(g, i):
                    gap = i
                    break
        return gap

    if reach == num_whole:
        for tail in reversed(range(len(tail_lengths))):
            yield units
            tokens = num_whole * layout.tokens_per_chunk + tail_lengths[tail]
            if (
                all(has_tail(g, tail) for g in range(len(layout.groups)))
                and (yield from first_gap(tokens)) is None
            ):
                return num_whole, tail
    chunks = reach
    while chunks:
        gap = yield from first_gap(chunks * layout.tokens_per_chunk)
        if gap is None:
            break
        chunks = gap
    return chunks, None


def needed_chunks(layout: Layout, group: int, num_tokens: int) -> range:
    """A tail counts as the last chunk."""
    size = layout.tokens_per_chunk
    count = -(-num_tokens // size)
    return range(_first_needed(layout.groups[group], num_tokens, size, count), count)


def _first_needed(group: Group, num_tokens: int, size: int, count: int) -> int:
    if group.attention == "full":
        return 0
    if group.attention == "state":
        return max(0, count - 1)
    return max(0, num_tokens - group.window) // size
