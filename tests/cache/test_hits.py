"""The longest hit is what its definition says, token by token, for every mix of attentions and
every pattern of missing chunks.
"""

from typing import Any, TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from kvhold.cache.chores import finish
from kvhold.cache.index.hits import longest_hit_turns, needed_chunks
from kvhold.core.layout import Group, Layout

SHAPE: dict[str, Any] = {"layers": 1, "planes": 1, "heads": 1, "head_dim": 1, "dtype": "int8"}

Piece: TypeAlias = tuple[int, str, int]  # group, "chunk" or "tail", index
Case: TypeAlias = tuple[Layout, int, list[int], set[Piece]]

groups = st.one_of(
    st.just(Group(**SHAPE)),
    st.just(Group(**SHAPE, attention="state")),
    st.integers(1, 20).map(lambda window: Group(**SHAPE, attention="sliding", window=window)),
)


def needs(group: Group, first_token: int, end_token: int, num_tokens: int) -> bool:
    """Whether a hit of `num_tokens` needs the chunk of these tokens: to go on, what of the past
    does the group look at?
    """
    if group.attention == "full":
        return first_token < num_tokens
    if group.attention == "state":
        return end_token == num_tokens
    return any(
        num_tokens - group.window <= token < num_tokens for token in range(first_token, end_token)
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout, how many whole chunks a prompt has, the tails that may follow, and which pieces are
    present.
    """
    size = draw(st.integers(1, 6))
    layout = Layout(
        groups=tuple(draw(st.lists(groups, min_size=1, max_size=3))), tokens_per_chunk=size
    )
    num_whole = draw(st.integers(0, 6))
    tails = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    pieces = [(g, "chunk", i) for g in range(len(layout.groups)) for i in range(num_whole)]
    pieces += [(g, "tail", i) for g in range(len(layout.groups)) for i in range(len(tails))]
    missing = draw(st.sets(st.sampled_from(pieces), max_size=6)) if pieces else set()
    return layout, num_whole, tails, set(pieces) - missing


@given(cases())
def test_the_longest_hit_is_the_longest_prefix_of_which_every_group_has_what_it_looks_at(
    case: Case,
) -> None:
    layout, num_whole, tails, present = case
    size = layout.tokens_per_chunk
    asked_of_full: list[int] = []

    def is_hit(num_tokens: int) -> bool:
        whole, rest = divmod(num_tokens, size)
        for g, group in enumerate(layout.groups):
            for i in range(whole):
                if (
                    needs(group, i * size, (i + 1) * size, num_tokens)
                    and (g, "chunk", i) not in present
                ):
                    return False
            if rest and (g, "tail", tails.index(rest)) not in present:
                return False
        return True

    def has_chunk(group: int, chunk: int) -> bool:
        if layout.groups[group].attention == "full":
            asked_of_full.append(chunk)
        return (group, "chunk", chunk) in present

    full = [g for g, group in enumerate(layout.groups) if group.attention == "full"]
    reach = next(
        (i for i in range(num_whole) if any((g, "chunk", i) not in present for g in full)),
        num_whole,
    )
    whole, tail = finish(
        longest_hit_turns(
            layout, reach, num_whole, tails, has_chunk, lambda g, i: (g, "tail", i) in present
        )
    )

    lengths = [i * size for i in range(1, num_whole + 1)] + [
        num_whole * size + tail for tail in tails
    ]
    assert whole * size + (tails[tail] if tail is not None else 0) == max(
        filter(is_hit, lengths), default=0
    )
    assert not asked_of_full, "the reach has said that already"


@given(groups, st.integers(1, 6), st.integers(1, 40))
def test_the_chunks_needed_are_those_the_group_looks_at(
    group: Group, size: int, num_tokens: int
) -> None:
    layout = Layout(groups=(group,), tokens_per_chunk=size)
    count = -(-num_tokens // size)
    ends = [min((i + 1) * size, num_tokens) for i in range(count)]
    assert list(needed_chunks(layout, 0, num_tokens)) == [
        i for i in range(count) if needs(group, i * size, ends[i], num_tokens)
    ]
