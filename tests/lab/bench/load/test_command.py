"""The command against a server that streams as vLLM does: what it sends, shows and writes, and how
it exits.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvhold.cli import cli
from kvhold.core.errors import ConfigError
from tests.lab.bench.load.server import Exchange, TestServer, serving, well

COMPARED = ["--serve-demo", "tiny", "--compare-policy", "lru", "--compare-policy", "learned"]
SHORT = ["--documents", "3", "--document-tokens", "40", "--output-tokens", "4"]


@pytest.fixture
def server() -> Iterator[TestServer]:
    """In a thread: the command has a loop of its own."""
    started: asyncio.Queue[Any] = asyncio.Queue()
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[TestServer] = []

    async def serve() -> None:
        async with serving() as server:
            found.append(server)
            ready.set()
            await started.get()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    yield found[0]
    loop.call_soon_threadsafe(started.put_nowait, None)
    thread.join()
    loop.close()


def load(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "load", *arguments])


def on(server: TestServer, workload: str, *arguments: str) -> Result:
    return load(workload, *arguments, "--base-url", server.base_url)


def prompts(server: TestServer) -> list[Any]:
    """Of the requests that count."""
    return [seen.body["prompt"] for seen in server.seen if seen.method == "POST"][5:]


def test_a_run_is_shown_written_and_drawn(server: TestServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    server.metrics = b'vllm:kvhold_lookup_tokens_total{engine="0"} 7\n'
    lines, picture, page = (tmp_path / name for name in ("load.jsonl", "load.png", "load.html"))
    result = on(
        server,
        "long-doc-qa",
        *SHORT,
        "--json",
        str(lines),
        "--plot",
        str(picture),
        "--html",
        str(page),
    )
    assert result.exit_code == 0, result.output
    assert "model model, tokens as prompts" in result.output
    assert "cold: 3 of 3 done, 0 errors" in result.output
    *requests, summary = map(json.loads, lines.read_text().splitlines())
    assert [request["group"] for request in requests] == ["cold"] * 3 + ["warm"] * 6
    assert summary["total"]["requests"] == 9
    assert summary["total"]["output_tokens"] == 36
    assert summary["groups"]["warm"]["cached_tokens"] == 6 * 36
    assert (
        summary["arguments"] | {"model": "model", "documents": 3, "order": "random"}
        == summary["arguments"]
    )
    assert summary["hits"]["cold"]["looked_up"] == 0
    assert picture.exists()
    assert page.exists()


WORKLOADS = [
    ["long-doc-qa", *SHORT],
    [
        "multi-doc-qa",
        "--documents",
        "4",
        "--documents-per-request",
        "2",
        "--requests",
        "3",
        "--document-tokens",
        "20",
    ],
    [
        "multi-round-qa",
        "--users",
        "2",
        "--rounds",
        "2",
        "--qps",
        "50",
        "--answer-tokens",
        "3",
        "--together",
    ],
    [
        "rag",
        "--qps",
        "100",
        "--requests",
        "4",
        "--document-tokens",
        "20",
        "--kv-storage",
        "1KiB",
        "--kv-bytes-per-token",
        "16",
    ],
    ["ttft-sweep", "--lengths", "16,32", "--flush-tokens", "40"],
    ["chats", "--chats-s", "20", "--think-s", "0.05", "--duration-s", "0.3"],
]


@pytest.mark.parametrize(
    "kind",
    [["--prompts", "tokens"], ["--prompts", "text"], ["--api", "chat"]],
    ids=lambda kind: kind[-1],
)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload[0])
def test_every_workload_runs_with_every_kind_of_prompt(
    server: TestServer, workload: list[str], kind: list[str]
) -> None:
    result = on(server, *workload, *kind, "--expect-max-errors", "0")
    assert result.exit_code == 0, result.output
    assert {seen.path for seen in server.seen if seen.method == "POST"} == {
        "/v1/chat/completions" if "chat" in kind else "/v1/completions"
    }


def test_answers_are_fed_back_as_the_ids_that_came(server: TestServer) -> None:
    assert (
        on(
            server,
            "multi-round-qa",
            "--users",
            "1",
            "--rounds",
            "2",
            "--answer-tokens",
            "3",
            "--qps",
            "50",
        ).exit_code
        == 0
    )
    first, second = prompts(server)
    assert second[: len(first) + 3] == [*first, 0, 1, 2]


def test_recorded_questions_are_asked(server: TestServer, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    said = [
        {"from": "human", "value": "Why is that?"},
        {"from": "gpt", "value": "No idea."},
        {"from": "human", "value": "Who knows?"},
    ]
    recorded.write_text(json.dumps([{"conversations": said}]))
    asked = [
        "multi-round-qa",
        "--users",
        "1",
        "--rounds",
        "2",
        "--qps",
        "50",
        "--sharegpt",
        str(recorded),
        "--prompts",
        "text",
    ]
    assert on(server, *asked, "--json", str(tmp_path / "rows.json")).exit_code == 0
    summary = json.loads((tmp_path / "rows.json").read_text().splitlines()[-1])
    assert summary["arguments"]["recorded"] == 1, "how many, not what they say"
    first, second = prompts(server)
    assert first.endswith("\n\nWhy is that?")
    assert second.startswith(first)
    assert second.endswith("\n\nWho knows?")


def test_a_trace_is_replayed(server: TestServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 10 * n, "input_length": 600, "output_length": 2, "hash_ids": [0, n]}
        for n in range(1, 4)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = on(server, "replay", str(trace), "--time-scale", "10", "--max-input-tokens", "550")
    assert result.exit_code == 0, result.output
    one, two, three = prompts(server)
    assert one[:512] == two[:512] == three[:512]
    assert len({tuple(prompt) for prompt in (one, two, three)}) == 3
    assert {len(prompt) for prompt in (one, two, three)} == {550}


def test_a_bad_trace_is_an_error_with_its_line(server: TestServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    result = on(server, "replay", str(trace))
    assert isinstance(result.exception, ConfigError)
    assert "line 1" in str(result.exception)


def test_gains_decide_how_it_exits(server: TestServer) -> None:
    assert (
        on(
            server,
            "long-doc-qa",
            *SHORT,
            "--expect-ttft-gain",
            "0.0001",
            "--expect-latency-gain",
            "0.0001",
        ).exit_code
        == 0
    )
    result = on(server, "long-doc-qa", *SHORT, "--expect-ttft-gain", "1e9")
    assert result.exit_code == 1
    assert "FAILED: the ttft gain of warm requests is" in result.output


def test_errors_are_counted_and_decide_how_it_exits(server: TestServer) -> None:
    async def now_and_then(exchange: Exchange) -> None:
        if len(server.seen) % 4:
            await well(exchange)
        else:
            await exchange.whole(503, b"come back later")

    server.answer = now_and_then
    assert on(server, "long-doc-qa", *SHORT).exit_code == 0
    result = on(server, "long-doc-qa", *SHORT, "--expect-max-errors", "0")
    assert result.exit_code == 1
    assert "x http 503, such as: come back later" in result.output
    assert "failed requests; expected at most 0" in result.output


def test_without_any_success_it_fails(server: TestServer) -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.whole(500, b"no")

    server.answer = broken
    result = on(server, "long-doc-qa", *SHORT)
    assert "answered none of 5 first requests; the last: http 500: no" in str(result.exception)
    result = on(server, "long-doc-qa", *SHORT, "--prewarm", "0")
    assert result.exit_code == 1
    assert "no request succeeded" in result.output


def test_ctrl_c_ends_it_with_what_there_is(server: TestServer, tmp_path: Path) -> None:
    stalled = threading.Event()

    async def three_and_no_more(exchange: Exchange) -> None:
        if sum(seen.method == "POST" for seen in server.seen) <= 3:
            await well(exchange)
        else:
            stalled.set()
            await asyncio.Event().wait()

    server.answer = three_and_no_more
    lines = tmp_path / "load.jsonl"
    options = [
        *SHORT,
        "--prewarm",
        "0",
        "--max-in-flight",
        "1",
        "--json",
        str(lines),
        "--base-url",
        server.base_url,
    ]
    # A shell has its background jobs ignore Ctrl-C, and their children with them.
    heeding = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from "
        "kvhold.cli import main; main()"
    )
    command = [sys.executable, "-c", heeding, "bench", "load", "long-doc-qa", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert stalled.wait(60)
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "interrupted: only the results so far" in output
    summary = json.loads(lines.read_text().splitlines()[-1])
    assert (summary["interrupted"], summary["total"]["requests"]) == (True, 3)


def test_the_key_comes_from_the_environment(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    result = on(server, "ttft-sweep", "--lengths", "8", "--api-key-env", "MY_KEY")
    assert result.exit_code == 0, result.output
    assert {seen.headers["authorization"] for seen in server.seen if seen.method == "POST"} == {
        "Bearer secret"
    }
    assert "secret" not in result.output


def test_a_router_is_told_the_user(server: TestServer) -> None:
    result = on(
        server,
        "multi-round-qa",
        "--users",
        "2",
        "--rounds",
        "1",
        "--qps",
        "50",
        "--user-header",
        "x-user-id",
        "--together",
    )
    assert result.exit_code == 0, result.output
    # None: those that do not count
    assert {seen.headers.get("x-user-id") for seen in server.seen if seen.method == "POST"} == {
        None,
        "0",
        "1",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a server with --base-url"),
        (["--base-url", "http://x", "--serve-demo", "tiny"], "leave --base-url out"),
        (["--base-url", "http://x", "--api", "chat", "--prompts", "tokens"], "use --prompts text"),
        (["--base-url", "http://x", "--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--base-url", "http://x", "--extra-body", "{"], "--extra-body"),
        (["--base-url", "nonsense"], "http://localhost:8000/v1"),
        (["--compare-policy", "lru", "--compare-policy", "learned"], "add --serve-demo"),
        (["--serve-demo", "tiny", "--compare-policy", "lru"], "needs two policies or more"),
        (
            [*COMPARED, "--html", "load.html"],
            "--compare-policy has no --plot, no --html",
        ),
        ([*COMPARED, "--expect-ttft-gain", "2"], "no --expect-ttft-gain"),
        (["--base-url", "http://x", "--vocab-size", "10"], "too few"),
        (["--base-url", "http://x", "--lengths", "1,b"], "such as 256,1024,4096"),
        (["--base-url", "http://x", "--lengths", "0"], "such as 256,1024,4096"),
        (["--base-url", "http://x", "--user-header", "a: b"], "such as x-user-id"),
        (["--base-url", "http://x", "--plot", "load.xyz"], "must end in one of .png, .svg, .pdf"),
        (["--base-url", "http://x", "--html", "/nowhere/load.html"], "there is no folder /nowhere"),
        (
            ["--base-url", "http://127.0.0.1:9", "--json", "/nowhere/file"],
            "there is no folder /nowhere",
        ),
        (
            ["--base-url", "http://x", "--timeout-s", "inf"],
            "inf is no number that can be used here",
        ),
        (
            ["--base-url", "http://x", "--expect-ttft-gain", "nan"],
            "nan is no number that can be used here",
        ),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_says_what_to_do(
    arguments: list[str], message: str
) -> None:
    result = load("ttft-sweep", "--model", "m", *arguments)
    assert result.exit_code
    assert message in result.output + str(result.exception)


def test_separators_and_storage_are_checked(server: TestServer) -> None:
    assert "it must be ids with commas" in on(server, "multi-doc-qa", "--separator", "###").output
    assert (
        "--kv-storage needs --kv-bytes-per-token"
        in on(server, "rag", "--kv-storage", "1GiB").output
    )
    few = [
        "--documents",
        "2",
        "--documents-per-request",
        "1",
        "--requests",
        "1",
        "--document-tokens",
        "9",
    ]
    assert (
        on(server, "multi-doc-qa", *few, "--separator", "7,8", "--system-tokens", "0").exit_code
        == 0
    )
    assert all(prompt[:2] == [7, 8] for prompt in prompts(server))


def test_without_the_http_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in ("client", "measure"):
        monkeypatch.delitem(sys.modules, f"kvhold_lab.bench.load.{name}", raising=False)
    result = load("ttft-sweep", "--base-url", "http://x", "--model", "m")
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'kvhold[lab]'" in str(result.exception)
