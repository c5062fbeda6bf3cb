"""A node plans for a client that says what computing costs it, and `kvhold explain` says why."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvhold.cli.explain import command as explain
from kvhold.core.planning import ComputeCost
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
    for listed in (run(client, "cmpl"), run(client)):
        assert [line.split()[1] for line in listed.output.splitlines()] == [
            "cmpl-cheap-2",
            "cmpl-dear-1",
        ]
    [decision] = json.loads(run(client, "dear-1", "--json").output)
    assert (
        decision["request"] == "cmpl-dear-1"
        and decision["alternatives"]["all"]["num_tokens"] == 160
    )


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
        ([], "no decision of any request yet"),
    ):
        said = run(client, *arguments)
        assert said.exit_code == 1
        assert told in said.output


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
