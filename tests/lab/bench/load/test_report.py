"""What is said about results: tables, lines of JSON, gates, a picture, and a page that nothing from
outside can break out of.
"""

import json
from pathlib import Path

import pytest

from kvhold_lab.bench.load.counters import Hits
from kvhold_lab.bench.load.report import (
    NO_COUNTERS,
    Gates,
    Summary,
    render,
    request_line,
    summarise,
    summary_line,
)
from kvhold_lab.bench.load.work import COLD, WARM, Reply, Result
from tests.lab.bench.load.test_metrics import result

HOSTILE = "<script>alert('$x^2$')</script>"


def summary(results: list[Result], hits: dict[str, Hits] | None = None) -> Summary:
    return summarise("w", {"model": HOSTILE}, results, hits or {}, interrupted=False)


RESULTS = [
    result(COLD, latency_s=4.0, ttft_s=2.0),
    result(WARM, started_s=5.0, ttft_s=0.5, gaps_s=(0.25, 0.25)),
]
FAILED = Result("g", {"user": 3}, 7.0, None, Reply(latency_s=1.0, error="http 500", detail=HOSTILE))


@pytest.mark.parametrize(
    ("gates", "broken"),
    [
        (Gates(), []),
        (Gates(ttft_gain=4.0, latency_gain=4.0, max_errors=1), []),
        (Gates(ttft_gain=4.1), ["the ttft gain of warm requests is 4.00; expected at least 4.1"]),
        (Gates(latency_gain=5), ["the latency gain of warm requests is 4.00; expected at least 5"]),
        (Gates(max_errors=0), ["1 failed requests; expected at most 0"]),
    ],
)
def test_gates_are_kept_or_broken_with_a_sentence(gates: Gates, broken: list[str]) -> None:
    assert gates.broken(summary([*RESULTS, FAILED])) == broken


def test_a_gain_that_is_not_known_is_not_reached() -> None:
    [sentence] = Gates(ttft_gain=0.1).broken(summary(RESULTS[:1]))
    assert "not known" in sentence


def test_lines_of_json_say_everything() -> None:
    line = json.loads(request_line(FAILED))
    assert (line["type"], line["user"], line["error"], line["ttft_s"]) == (
        "request",
        3,
        "http 500",
        None,
    )
    hits = {
        "cold": Hits(
            looked_up=10, by_tier={"ram": 4}, missed={"never_stored": 6}, loaded=4, own=None
        )
    }
    last = json.loads(summary_line(summary([*RESULTS, FAILED], hits)))
    assert last["type"] == "summary"
    assert set(last["groups"]) == {COLD, WARM, "g"}
    assert last["groups"][WARM]["itl_s"] == {"mean": 0.25, "p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert last["gains"] == {"ttft": 4.0, "latency": 4.0}
    assert last["hits"]["cold"]["by_tier"] == {"ram": 4}
    assert last["total"]["errors"] == {"http 500": 1}
    assert last["first_errors"] == {"http 500": HOSTILE}


def test_what_the_server_does_not_tell_is_null_and_said() -> None:
    own = summary([result(tokens=(None, 3, None))])
    last = json.loads(summary_line(own))
    assert (last["hits"], last["hits_note"], last["total"]["cached_tokens"]) == (
        None,
        NO_COUNTERS,
        None,
    )
    assert NO_COUNTERS in render(own)
    assert "--enable-prompt-tokens-details" in render(own)


def test_tables_have_a_line_for_each_group_and_a_column_for_each_tier() -> None:
    hits = {
        name: Hits(looked_up=9_999, by_tier={tier: 5}, missed={}, loaded=1, own=2)
        for name, tier in ((COLD, "ram"), (WARM, "disk"))
    }
    lines = render(summary([*RESULTS, FAILED], hits)).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [COLD, WARM, "g", "all"]
    assert any(
        line.split()[-6:] == ["ram", "disk", "loaded", "engine's", "own", "cache"] for line in lines
    )
    assert any(line.split() == [WARM, "9,999", "0", "5", "1", "2"] for line in lines)


def test_pictures_and_pages_take_any_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvhold_lab.bench.load.pictures import draw, write_page

    picture, page = tmp_path / "load.png", tmp_path / "load.html"
    results = [*RESULTS, FAILED]
    draw(results, HOSTILE, picture)
    write_page(summary(results), results, HOSTILE, page)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "default-src 'none'" in text
    assert "http://" not in text
    assert "https://" not in text


def test_a_picture_of_failures_alone_is_empty(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvhold_lab.bench.load.pictures import draw

    draw([FAILED], "t", tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 0
