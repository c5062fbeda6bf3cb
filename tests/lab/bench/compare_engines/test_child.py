"""A child process under measurement: its protocol with a driver that is made up, its pool, and
kvhold's half for real.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvhold.cli import cli
from kvhold_lab.bench.compare_engines import lmcache_env
from kvhold_lab.bench.compare_engines.child import (
    POOL_NAME,
    ChildOptions,
    ComparedEngine,
    Layers,
    checksum,
    fill,
    own_bytes,
)
from kvhold_lab.bench.compare_engines.lmcache_env import NoLMCache, lmcache_python
from kvhold_lab.bench.compare_engines.systems import (
    KVHOLD,
    KVHOLD_CACHED,
    OURS,
    SERVER,
    PeerFailed,
    PeerSystem,
    launch,
    start,
)

MADE_UP = "a_driver_that_is_made_up"
TINY = [
    "--tokens",
    "512",
    "--layers",
    "2",
    "--heads",
    "2",
    "--head-dim",
    "16",
    "--rounds",
    "1",
    "--lookup-tokens",
    "1024",
]


def options(**changes: Any) -> ChildOptions:
    given = {
        "mode": "node",
        "tier": "ram",
        "num_tokens": 64,
        "tokens_per_chunk": 32,
        "tokens_per_block": 16,
        "folder": "",
    }
    return ChildOptions(
        **{**given, "layers": 2, "heads": 1, "head_dim": 8, "cache_bytes": 1 << 20, **changes}
    )


class Remembers:
    """A driver that keeps copies of blocks; `spoil` says what happens to them."""

    def __init__(self, layers: Layers, spoil: Callable[[Any], Any] = lambda kept: kept) -> None:
        self.layers = layers
        self._spoil = spoil
        self._kept: Any = None

    def expect(self, num_tokens: int) -> None: ...

    def store(self, tokens: list[int], block_ids: list[int]) -> None:
        self._kept = [layer[:, block_ids].copy() for layer in self.layers]

    def settle(self) -> None: ...

    def lookup(self, tokens: list[int]) -> tuple[int, Callable[[], None]]:
        return len(tokens), lambda: None

    def retrieve(self, tokens: list[int], block_ids: list[int]) -> int:
        for layer, kept in zip(self.layers, self._spoil(self._kept), strict=True):
            layer[:, block_ids] = kept
        return len(tokens)

    def forget(self) -> None: ...

    def pids(self) -> list[int]:
        return []

    def close(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ComparedEngine:
    monkeypatch.setitem(
        sys.modules, MADE_UP, SimpleNamespace(start=lambda options, layers: Remembers(layers))
    )
    return ComparedEngine(MADE_UP, options())


def test_what_comes_back_has_the_checksum_of_what_was_stored(engine: ComparedEngine) -> None:
    tokens = list(range(64))
    stored = engine.do({"op": "store", "tokens": tokens, "seed": 1})
    assert engine.do({"op": "retrieve", "tokens": tokens})["checksum"] == stored["checksum"]
    assert engine.do({"op": "store", "tokens": tokens, "seed": 2})["checksum"] != stored["checksum"]


def test_a_driver_that_brings_nothing_or_mixes_blocks_up_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoils: list[Callable[[Any], Any]] = [
        lambda kept: [0] * len(kept),
        lambda kept: [layer[:, ::-1] for layer in kept],
    ]
    for spoil in spoils:
        made = SimpleNamespace(start=lambda options, layers, spoil=spoil: Remembers(layers, spoil))
        monkeypatch.setitem(sys.modules, MADE_UP, made)
        engine = ComparedEngine(MADE_UP, options())
        stored = engine.do({"op": "store", "tokens": [1] * 64, "seed": 1})
        assert engine.do({"op": "retrieve", "tokens": [1] * 64})["checksum"] != stored["checksum"]


@pytest.mark.parametrize(
    "asked",
    [
        {"op": "dance"},
        {"op": "store", "tokens": [1] * 7, "seed": 0},
        {"op": "retrieve", "tokens": [1] * 128},
    ],
)
def test_what_it_cannot_do_is_an_error(engine: ComparedEngine, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no such operation|tokens: whole blocks"):
        engine.do(asked)


def test_a_checksum_is_of_blocks_in_the_order_of_the_prompt() -> None:
    layers = [np.zeros((2, 5, 16, 1, 8), np.uint16) for _ in range(2)]
    fill(layers, np.array([3, 1]), seed=5)
    moved = [np.zeros_like(layer) for layer in layers]
    fill(moved, np.array([0, 4]), seed=5)
    assert (
        checksum(layers, np.array([3, 1]))
        == checksum(moved, np.array([0, 4]))
        != checksum(layers, np.array([1, 3]))
    )


def test_memory_does_not_count_the_engines_own_kv(engine: ComparedEngine) -> None:
    before = own_bytes(os.getpid(), 1 << 40)
    large = ComparedEngine(MADE_UP, options(num_tokens=64 * 4096))
    assert POOL_NAME in Path("/proc/self/smaps").read_text()
    assert (
        own_bytes(os.getpid(), 1 << 40) - before
        < 32 << 20
        < sum(layer.nbytes for layer in large._driver.layers)
    )


@contextmanager
def running(name: str) -> Iterator[PeerSystem]:
    peer = launch(name, python=None, threads=1)
    try:
        yield peer
    finally:
        peer.close()


def test_a_child_says_what_went_wrong_and_lives_on(tmp_path: Path) -> None:
    with running(KVHOLD) as peer:
        with pytest.raises(PeerFailed, match="the first operation must be start"):
            peer.do("lookup", tokens=[1])
        with pytest.raises(PeerFailed, match="KeyError: 'tape'"):
            start(peer, options(tier="tape", folder=str(tmp_path)))
        peer.do("stop")


def test_an_environment_that_cannot_be_made_is_the_peers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(NoLMCache, match="is no virtual environment"):
        lmcache_python(tmp_path)

    def refuse(folder: Path) -> Path:
        raise NoLMCache("pip install lmcache\nno network")

    monkeypatch.setattr(lmcache_env, "lmcache_python", refuse)
    rows = tmp_path / "rows.json"
    done = CliRunner().invoke(
        cli, ["bench", "compare-engines", *TINY, "--system", SERVER, "--json", str(rows)]
    )
    assert done.exit_code == 0, done.output
    assert "FAILED: pip install lmcache" in done.output
    assert [(row["system"], row["error"]) for row in json.loads(rows.read_text())] == [
        (SERVER, "pip install lmcache\nno network")
    ]


def test_pips_words_are_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho No matching distribution found for torch\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    with pytest.raises(NoLMCache, match="No matching distribution found for torch"):
        lmcache_python(tmp_path / "env")
    assert not (tmp_path / "env" / lmcache_env._STAMP).exists()


@pytest.mark.parametrize(
    "arguments", [["--tokens", "300"], ["--lookup-tokens", "1000"], ["--block-tokens", "48"]]
)
def test_sizes_that_do_not_fit_chunks_are_refused_by_name(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, ["bench", "compare-engines", "--system", KVHOLD, *arguments])
    assert (done.exit_code, arguments[0] in done.output) == (2, True), done.output


@pytest.mark.slow
@pytest.mark.server
def test_kvhold_alone_stores_and_retrieves_the_same_bytes_from_memory_and_disk(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.json"
    systems = ["--system", KVHOLD, "--system", KVHOLD_CACHED]
    arguments = [
        *TINY,
        *systems,
        "--tier",
        "ram",
        "--tier",
        "cached-disk",
        "--threads",
        "1",
        "--json",
        str(rows),
    ]
    done = CliRunner().invoke(cli, ["bench", "compare-engines", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    every = json.loads(rows.read_text())
    found = {(row["operation"], row["tier"]): row for row in every if row["system"] == KVHOLD}
    on_disk = {
        ("store", "cached-disk"),
        ("store, written", "cached-disk"),
        ("retrieve", "cached-disk"),
    }
    moved = {("store", "ram"), ("retrieve", "ram"), *on_disk}
    assert found.keys() == moved | {
        ("lookup", "ram"),
        ("start-up", "-"),
        ("memory", "-"),
        ("import", "-"),
        ("import, client", "-"),
    }
    assert {
        (row["operation"], row["tier"]) for row in every if row["system"] == KVHOLD_CACHED
    } == on_disk
    assert all(row["error"] == "" for row in every)
    assert [
        row["equal"] for row in every if row["operation"] == "retrieve" and row["system"] in OURS
    ] == [True] * 3
    assert found["lookup", "ram"]["equal"] is True
    assert found["memory", "-"]["median_bytes"] > 0
    assert all(found[key]["mb_s"] > 0 for key in moved)


def test_options_travel_as_json() -> None:
    given = options(redis_port=6379)
    assert ChildOptions(**json.loads(json.dumps(asdict(given)))) == given
