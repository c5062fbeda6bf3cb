"""`kvhold bench codecs`: the rows it promises, and that it does not print numbers of a codec that
is wrong.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvhold.codecs import Codec, Raw
from kvhold.core.layout import Layout
from kvhold_lab.bench import codecs as bench
from kvhold_lab.bench.command import command

pytest.importorskip("numba", reason="no numba in this environment")

SMALL = bench.CodecSample(bench.synthetic().bits[:2, :, :40])


class Careless(Raw):
    """Forgets the last byte."""

    def decode(self, encoded: memoryview, out: memoryview, **place: object) -> None:
        out[:-1] = encoded[:-1]


def test_each_codec_on_each_kind_of_kv_is_a_row() -> None:
    names = ("fp8", "int8", "lossless", "raw")
    sample = bench.CodecSample(np.ascontiguousarray(SMALL.bits))
    drops = {"fp8": 0.5, "raw": 0.0}
    rows = list(bench.rows(names, {"one": sample, "other": sample}, rounds=1, drops=drops))
    assert [(row.data, row.codec) for row in rows] == [
        (data, name) for data in ("one", "other") for name in names
    ]
    for row in rows:
        assert min(
            row.enc_mb_s, row.dec_mb_s, row.memcpy_mb_s
        ) > 0 and row.accuracy_drop == drops.get(row.codec)
        assert (row.error == 0) == (row.codec in ("raw", "lossless"))
        assert row.ratio == 1 if row.codec == "raw" else row.ratio > 1.3


def test_a_codec_that_is_wrong_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(_: str) -> Codec:
        return Careless()

    monkeypatch.setattr(bench, "make_codec", careless)
    with pytest.raises(AssertionError, match="codec raw is off"):
        list(
            bench.rows(
                ["raw"], {"small": bench.CodecSample(np.ascontiguousarray(SMALL.bits))}, rounds=1
            )
        )


def test_chunks_behind_each_other_are_encoded_each_as_one() -> None:
    layers, chunks = (
        [],
        bench.CodecSample(np.concatenate([SMALL.bits, SMALL.bits, SMALL.bits]), chunks=3),
    )

    class Watching(Raw):
        def encode(
            self, plain: memoryview, out: memoryview, *, layout: Layout, layer: int, **place: Any
        ) -> int:
            assert layout.groups[0].layers == 2
            layers.append(layer)
            return super().encode(plain, out, layout=layout, layer=layer, **place)

    watched = bench._Run(Watching(), chunks)
    watched.measure(counts=True)
    assert layers == [0, 1] * 3 and watched.row("three", 1.0, None).ratio == 1


def run(tmp_path: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The rows and what is printed of `kvhold bench codecs --codec raw`."""
    file = tmp_path / "rows.json"
    found = CliRunner().invoke(
        command,
        ["codecs", "--codec", "raw", *arguments, "--json", str(file)],
        catch_exceptions=False,
    )
    assert found.exit_code == 0, found.output
    return json.loads(file.read_text()), found.output


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    rows, shown = run(tmp_path, "--no-accuracy")
    assert [row["data"] for row in rows] == ["synthetic", "normal"]
    assert (
        set(rows[0]) >= {"codec", "ratio", "enc_mb_s", "dec_mb_s", "error", "accuracy_drop"}
        and rows[0]["accuracy_drop"] is None
    )
    assert shown.count("\nraw ") == 2


@pytest.mark.slow
def test_accuracy_and_kv_are_those_of_the_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("kvhold_lab.bench.codecs.TRAINED_CHUNKS", 3)
    monkeypatch.setattr("kvhold_lab.bench.quality.run.CONTEXTS", 4)
    rows, _ = run(tmp_path)
    assert [(row["data"], row["accuracy_drop"]) for row in rows] == [
        ("synthetic", 0.0),
        ("normal", 0.0),
        ("trained", 0.0),
    ]


def test_without_the_trained_model_the_reason_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhold_lab.bench.quality.run.find_weights", lambda: None)
    rows, shown = run(tmp_path)
    assert (
        "accuracy is not measured: the small trained model is in a checkout's "
        "benchmarks/quality/model" in shown
    )
    assert [(row["data"], row["accuracy_drop"]) for row in rows] == [
        ("synthetic", None),
        ("normal", None),
    ]


def test_an_unknown_codec_is_named() -> None:
    found = CliRunner().invoke(command, ["codecs", "--codec", "rawr"])
    assert found.exit_code == 2 and "rawr" in found.output and "lossless" in found.output
