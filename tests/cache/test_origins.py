"""The runs of chunks that came from each peer."""

from kvhold.cache.transfer.origins import Origins
from kvhold.cli.explain import _loaded
from kvhold.core.planning import LoadedChunks
from kvhold.tiers.base import Origin


def test_the_chunks_of_a_peer_are_runs_with_the_time_of_all_its_loads() -> None:
    origins = Origins()
    first, second = Origin("a:1", 10.0, 10.5), Origin("a:1", 10.25, 11.0)
    for chunk in (12, 13, 13, 14):
        origins.add(first, chunk)
    for chunk in (16, 15, 30):
        origins.add(second, chunk)
    origins.add(Origin("b:1", 10.0, 10.5), 3)
    assert origins.loaded() == [
        LoadedChunks("a:1", [[12, 16], [30, 30]], 1.0),
        LoadedChunks("b:1", [[3, 3]], 0.5),
    ]
    assert [_loaded(one) for one in origins.loaded()] == [
        "chunks 12-16, 30 from a:1, 1000.0 ms",
        "chunk 3 from b:1, 500.0 ms",
    ]


def test_many_runs_take_little_memory() -> None:
    origins = Origins()
    for chunk in range(0, 100_000, 2):
        origins.add(Origin("a:1", 0.0, 1.0), chunk)
    [loaded] = origins.loaded()
    assert len(loaded.chunks) == 16
    assert loaded.chunks[0] == [0, 0]
    assert loaded.chunks[-1] == [30, 99_998]
