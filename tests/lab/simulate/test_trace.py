"""A trace is read as it is written, or refused with the line; chunks of any size name the same
prompts.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import ConfigError
from kvhold_lab.simulate import trace as module
from kvhold_lab.simulate.trace import Cut, parse_trace, read_trace
from tests.lab.simulate.traces import make_trace


def line(num_tokens: int, ids: list[int]) -> bytes:
    return f'{{"input_length": {num_tokens}, "hash_ids": {ids}}}\n'.encode()


def prompts(cut: Cut) -> list[list[int]]:
    """The chunks of each request."""
    return [
        cut.chunks[begin:end].tolist()
        for begin, end in zip(cut.starts, cut.starts[1:], strict=False)
    ]


def test_requests_share_what_their_prefixes_share() -> None:
    trace = parse_trace([line(1_100, [7, 8, 9]), line(1_024, [7, 8]), line(1_024, [8, 7])])
    cut = trace.cut(512)
    assert prompts(cut) == [[0, 1], [0, 1], [2, 3]], "an id is another block after another one"
    assert cut.parents.tolist() == [-1, 0, -1, 2]
    assert trace.num_tokens.sum() == 3_148


def test_smaller_chunks_divide_a_block_and_what_there_is_of_the_last() -> None:
    cut = parse_trace([line(900, [5, 6]), line(1_024, [5, 9])]).cut(256)
    assert prompts(cut) == [[0, 1, 2], [0, 1, 4, 5]]
    assert cut.parents[[0, 1, 2, 4, 5]].tolist() == [-1, 0, 1, 1, 4]


def test_larger_chunks_join_blocks() -> None:
    cut = parse_trace(
        [line(2_100, [1, 2, 3, 4, 5]), line(1_600, [1, 2, 3, 9]), line(1_100, [8, 2, 3])]
    ).cut(1_024)
    assert prompts(cut) == [[0, 1], [0], [2]]
    assert cut.parents.tolist() == [-1, 0, -1]


def test_a_trace_may_leave_the_short_block_out() -> None:
    trace = parse_trace([line(1_000, [1])])
    assert [prompts(trace.cut(size)) for size in (512, 128)] == [[[0]], [[0, 1, 2, 3]]]


@given(st.integers(0, 50), st.sampled_from([64, 128, 256, 512, 1_024, 2_048]))
def test_two_prompts_share_as_many_chunks_as_they_share_tokens(seed: int, size: int) -> None:
    """Of whole blocks; a last, shorter one is shared with an equal prompt alone."""
    trace = parse_trace(make_trace(sessions=6, turns=4, seed=seed))
    cut = trace.cut(size)
    blocks = [
        trace.blocks[begin:end].tolist()
        for begin, end in zip(trace.starts, trace.starts[1:], strict=False)
    ]
    rows = prompts(cut)
    for one, (mine, tokens) in enumerate(zip(rows, trace.num_tokens, strict=True)):
        assert len(mine) == tokens // size
        assert [cut.parents[chunk] for chunk in mine] == [-1, *mine[:-1]][: len(mine)]
        for other in range(one):
            shared = (
                sum(a == b for a, b in zip(blocks[one], blocks[other], strict=False)) * 512 // size
            )
            assert sum(a == b for a, b in zip(mine, rows[other], strict=False)) == min(
                shared, len(mine), len(rows[other])
            )


@pytest.mark.parametrize("size", [0, -512, 100, 768])
def test_a_chunk_that_neither_divides_nor_joins_blocks_is_refused(size: int) -> None:
    with pytest.raises(
        ConfigError, match=r"chunk_tokens is .* must divide the trace's block of 512 tokens"
    ):
        parse_trace([line(512, [1])]).cut(size)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "line 2: "),
        (b"\xff\xfe", "line 2: "),
        (b"[1]", r"line 2: Expected `object`, got `array`"),
        (b'{"input_length": 512}', r"line 2: Object missing required field `hash_ids`"),
        (
            b'{"input_length": -1, "hash_ids": []}',
            r"line 2: Expected `int` >= 0 - at `\$.input_length`",
        ),
        (
            b'{"input_length": 512, "hash_ids": ["a"]}',
            r"line 2: Expected `int`, got `str` - at `\$.hash_ids\[0\]`",
        ),
        (b'{"input_length": 512, "hash_ids": [true]}', r"line 2: Expected `int`, got `bool`"),
        (
            b'{"input_length": 2000, "hash_ids": [1, 2]}',
            (
                r"line 2: hash_ids has 2 ids, but 2000 tokens .* are 4 blocks of 512; "
                r"set block_tokens"
            ),
        ),
        (b'{"input_length": 512, "hash_ids": [1, 2]}', r"line 2: hash_ids has 2 ids"),
    ],
)
def test_a_bad_line_is_named(bad: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_trace([line(512, [1]), bad])


def test_what_else_a_line_has_is_ignored_and_so_are_empty_ones() -> None:
    trace = parse_trace(
        [
            (
                b'{"timestamp": 1.5, "input_length": 512, "output_length": 9, "hash_ids": [3], '
                b'"x": {}}\n'
            ),
            b"\n",
            line(0, []),
        ]
    )
    assert trace.num_tokens.tolist() == [512, 0]
    assert prompts(trace.cut(512)) == [[0], []]


def test_only_so_many_requests_are_read() -> None:
    assert parse_trace([line(512, [1]), b"not read"], num_requests=1).num_requests == 1


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.jsonl: it has no requests"):
        read_trace(tmp_path / "trace.jsonl")


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path)


def test_what_would_take_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 2)
    with pytest.raises(ConfigError, match="request 2: more than 2 blocks; read fewer requests"):
        parse_trace([line(1_024, [1, 2]), line(512, [1])])
