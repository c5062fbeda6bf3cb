"""`kvhold bench codecs`: the rows it promises, and that it does not print numbers of a codec that is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvhold.cli.bench import codecs as bench
from kvhold.cli.bench.command import command
from kvhold.codecs import Codec, Raw

pytest.importorskip("numba", reason="no numba in this environment")

SMALL = bench.Sample(bench.synthetic().bits[:2, :, :40])


class Careless(Raw):
    """Forgets the last byte."""

    def decode(self, encoded: memoryview, out: memoryview, **place: object) -> None:
        out[:-1] = encoded[:-1]


def test_each_codec_on_each_kind_of_kv_is_a_row() -> None:
    names = ("fp8", "int8", "lossless", "raw")
    sample = bench.Sample(np.ascontiguousarray(SMALL.bits))
    rows = list(bench.rows(names, {"one": sample, "other": sample}, rounds=1))
    assert [(row.data, row.codec) for row in rows] == [(data, name) for data in ("one", "other") for name in names]
    for row in rows:
        assert min(row.enc_mb_s, row.dec_mb_s, row.memcpy_mb_s) > 0 and row.accuracy_drop is None
        assert (row.error == 0) == (row.codec in ("raw", "lossless"))
        assert row.ratio == 1 if row.codec == "raw" else row.ratio > 1.3


def test_a_codec_that_is_wrong_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(_: str) -> Codec:
        return Careless()

    monkeypatch.setattr(bench, "make_codec", careless)
    with pytest.raises(AssertionError, match="codec raw is off"):
        list(bench.rows(["raw"], {"small": bench.Sample(np.ascontiguousarray(SMALL.bits))}, rounds=1))


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    found = CliRunner().invoke(command, ["codecs", "--codec", "raw", "--json", str(tmp_path / "rows.json")])
    assert found.exit_code == 0, found.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["data"] for row in rows] == ["synthetic", "normal"]
    assert set(rows[0]) >= {"codec", "ratio", "enc_mb_s", "dec_mb_s", "error", "accuracy_drop"} and rows[0]["accuracy_drop"] is None
    assert found.output.count("\nraw ") == 2


def test_an_unknown_codec_is_named() -> None:
    found = CliRunner().invoke(command, ["codecs", "--codec", "rawr"])
    assert found.exit_code == 2 and "rawr" in found.output and "lossless" in found.output
