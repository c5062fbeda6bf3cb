"""The length of a hit: the longest prefix for which every group has its needed chunks.

Full attention needs every chunk. Sliding attention needs those that overlap the last `window`
tokens. A state (recurrent layers) needs only the last chunk, because a state stands for all tokens
up to its end. Pure; a function tells which chunks are present.
"""

from collections.abc import Callable, Sequence

from kvhold.cache.chores import Turns, finish
from kvhold.core.layout import Group, Layout

Present = Callable[
    [int, int], bool
]  # (group, number of the chunk or of the tail) -> every shard has it


def longest_hit(
    layout: Layout,
    reach: int,
    num_whole: int,
    tail_lengths: Sequence[int],
    has_chunk: Present,
    has_tail: Present,
) -> tuple[int, int | None]:
    """Return `(whole chunks, tail)` of the longest hit; tail: an index into `tail_lengths`, or
    None.

    reach: number of whole chunks from the start that every full-attention group has
    num_whole: number of whole chunks of the prompt
    has_chunk(group, i): presence of whole chunk i; called for other groups only
    has_tail(group, i): presence of the tail of tail_lengths[i]
    """
    return finish(longest_hit_turns(layout, reach, num_whole, tail_lengths, has_chunk, has_tail))


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
    """Do `longest_hit` in steps (`chores.py`). units: the cost of one `has_chunk`."""
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
        chunks = gap  # every hit that ends after the gap and before here looks at it, too
    return chunks, None


def needed_chunks(layout: Layout, group: int, num_tokens: int) -> range:
    """Return the numbers of the chunks of `group` that a hit of `num_tokens` needs.

    A tail counts as the chunk after the whole ones.
    """
    size = layout.tokens_per_chunk
    count = -(-num_tokens // size)
    return range(_first_needed(layout.groups[group], num_tokens, size, count), count)


def _first_needed(group: Group, num_tokens: int, size: int, count: int) -> int:
    if group.attention == "full":
        return 0
    if group.attention == "state":
        return max(0, count - 1)
    return max(0, num_tokens - group.window) // size
