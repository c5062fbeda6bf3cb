"""A node plans for a client that says what computing costs it, and `kvhold explain` says why."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvhold.cli.explain import command as explain
from kvhold.core.planning import BlendReport, ComputeCost, LoadedChunks, RequestInfo, SpanReport
from kvhold.core.reasons import SLOWER
from kvhold.net import messages as m
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, flood, store
from tests.node.nodes import PATIENT_S, SPACE, RawClient, RunningNode

DEAR, CHEAP = (
    ComputeCost(f"cmpl-{name}", 160, 0, 2048, 1e-3, token_s, 0.0, 0.01, 1e-9)
    for name, token_s in (("dear-1", 1.0), ("cheap-2", 1e-6))
)


@pytest.fixture
def client(start_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch) -> NodeClient:
    monkeypatch.setenv("KVHOLD_CLIENT_CALL_TIMEOUT_S", str(PATIENT_S))
    client = start_node().client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 160))
    return client


def run(client: NodeClient, *arguments: str) -> Result:
    return CliRunner().invoke(
        explain, [*arguments, "--socket", str(client.path)], catch_exceptions=False
    )


def test_the_command_says_what_was_decided_why_and_what_came_of_it(client: NodeClient) -> None:
    query = a_prompt(SPACE, 160).query()
    with client.lookup(query, cost=DEAR) as hit:
        assert (hit.num_tokens, hit.arriving) == (160, False)
    client.report_timing(DEAR.request, load_s=0.0125, compute_s=1.5)
    with client.lookup(query, cost=CHEAP) as hit:
        assert (hit.num_tokens, hit.ticket, hit.reason) == (0, 0, SLOWER)
    with client.lookup(query) as hit:
        assert hit.num_tokens == 160, "who says nothing gets all"

    said = run(client, "dear")
    assert said.exit_code == 0
    assert "loading all of it takes 1.01 s, computing it 160.00 s" in said.output
    assert "0.0125" in said.output and "1.5000" in said.output and "160 in ram" in said.output
    assert "computing it takes 1.2 ms, loading all of it" in run(client, "cheap-2").output
    names = ["cmpl-cheap-2", "cmpl-dear-1"]
    for listed, wanted in ((run(client, "cmpl"), names), (run(client), ["-", *names])):
        assert [line.split()[1] for line in listed.output.splitlines()] == wanted
    [decision] = json.loads(run(client, "dear-1", "--json").output)
    assert (
        decision["request"] == "cmpl-dear-1"
        and decision["alternatives"]["all"]["num_tokens"] == 160
    )


def test_a_request_without_a_plan_has_a_story_too(client: NodeClient) -> None:
    longer = a_prompt(SPACE, 160).followed_by(list(range(40))).query()
    info = RequestInfo("cmpl-plain-3", "chat 7", 201, 32)
    client.lookup(longer, info=info).close()
    client.report_timing("cmpl-plain-3", load_s=0.25, compute_s=1.5)
    client.lookup(longer, uses="none", info=info).close()
    said = run(client, "plain").output
    assert "decision  not planned" in said
    assert "201 in all, 32 in the engine already, found: 160 in ram" in said
    assert "missing   the next chunk was never stored" in said
    assert re.search(r"^measured +160 +0\.0000 +0\.2500 +1\.5000 +1\.7500$", said, re.MULTILINE)
    assert "compute all" not in said
    [story] = client.explain("plain")
    assert (story.session, story.reason, story.namespace) == (
        "chat 7",
        "never_stored",
        SPACE.digest.hex(),
    )
    assert story.client.startswith("test (pid ")


def test_the_command_says_what_is_missing_and_since_when(client: NodeClient) -> None:
    client.lookup(a_prompt(SPACE, 160).query(), cost=DEAR).close()
    assert "missing" not in run(client, "dear").output
    client.lookup(a_prompt(SPACE, 160, seed=1).query(), cost=DEAR).close()
    assert "missing   the next chunk was never stored" in run(client, "dear").output
    flood(client, SPACE)
    client.lookup(a_prompt(SPACE, 160).query(), cost=DEAR).close()
    said = run(client, "dear").output
    assert re.search(r"^missing   the next chunk was evicted \d+ (s|min) ago$", said, re.MULTILINE)


def test_what_the_node_does_not_remember_is_said(client: NodeClient) -> None:
    for arguments, told in (
        (["nobody"], "no decision of a request 'nobody'"),
        (["cmpl-9"], "no decision of a request 'cmpl-9'"),
    ):
        said = run(client, *arguments)
        assert said.exit_code == 1
        assert told in said.output


def test_the_command_says_how_a_request_was_blended(client: NodeClient) -> None:
    spans = [
        SpanReport(0, 32, {"ram": 32}),
        SpanReport(32, 64, {"peers": 32}, [LoadedChunks("b:7711", [[0, 1]], 0.0031)]),
        SpanReport(64, 96, missing="never_stored", is_alone=True),
    ]
    client.report_blend(BlendReport("b-1", "blended", 100, 0, 80, 20, "first ratio=0.1", "", spans))
    client.report_blend(BlendReport("c-2", "refused", 100, 0, 0, 100, "query", "no permit"))
    said = run(client, "b-1").output.splitlines()
    assert said[3:] == [
        "blend     blended",
        "kv        0 exact, 80 reused, 20 recomputed (20.0 %), by first ratio=0.1",
        "span      0-32: 32 in ram",
        "span      32-64: 32 in peers, chunks 0-1 from b:7711, 3.1 ms",
        "span      64-96: not found, missing: never_stored, computed alone",
    ]
    assert "blend     refused: no permit" in run(client, "c-2").output
    listed = run(client).output.splitlines()
    assert [line.split("tokens: ")[1] for line in listed] == [
        "no permit",
        (
            "blended by first ratio=0.1: 0 exact, 80 reused, 20 recomputed, 1 of 3 spans were "
            "computed alone"
        ),
    ]


def test_a_planned_request_has_its_blend_too(client: NodeClient) -> None:
    client.lookup(a_prompt(SPACE, 160).query(), cost=DEAR).close()
    client.report_blend(BlendReport(DEAR.request, "blended", 160, 0, 100, 60, "query"))
    [decision] = client.explain(DEAR.request)
    assert decision.alternatives and decision.blend is not None
    said = run(client, "dear").output
    assert "100 reused, 60 recomputed (37.5 %), by query" in said and "load the whole hit" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"result": "odd"},
        {"num_tokens": -1},
        {"note": "n" * 1001},
        {"spans": [SpanReport(0, 1)] * 257},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_client_with_an_impossible_report_is_hung_up_on(
    client: NodeClient, changes: dict[str, Any]
) -> None:
    values: dict[str, Any] = {"request": "r", "result": "blended", "num_tokens": 1} | changes
    with RawClient(client.path, greet=True) as raw:
        assert isinstance(raw.ask(m.ReportBlend(BlendReport(**values))), m.Refused)
        assert raw.is_closed()


@pytest.mark.parametrize(
    "changes",
    [
        {"token_s": -1.0},
        {"num_tokens": -1},
        {"step_tokens": 0},
        {"request": "r" * 201},
        {"load_s": float("inf")},
    ],
    ids=str,
)
def test_a_client_with_impossible_costs_is_hung_up_on(
    client: NodeClient, changes: dict[str, Any]
) -> None:
    values = {name: getattr(DEAR, name) for name in DEAR.__struct_fields__} | changes
    with RawClient(client.path, greet=True) as raw:
        assert isinstance(
            raw.ask(m.Lookup(a_prompt(SPACE, 160).query(), ComputeCost(**values))), m.Refused
        )
        assert raw.is_closed()
    assert client.status()["held"]["tickets"] == 0
