"""Spans of a real node: one round trip, and nothing stays held."""

from typing import Any

import pytest

from kvhold.core.errors import DeadlineExceeded
from kvhold.net import messages as m
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, check, store
from tests.node.fleets import Fleet, fleet, joined, peers, port_of
from tests.node.nodes import NOTHING, PATIENT_S, SPACE, RunningNode, eventually, held_by

__all__ = ["fleet"]

SPANS = [a_prompt(SPACE.of_spans, 24 + number, seed=number) for number in range(20)]
QUERIES = [span.query() for span in SPANS]


@pytest.fixture
def client(node: RunningNode) -> NodeClient:
    client = node.client()
    client.register(SPACE.of_spans)
    for span in SPANS:
        store(client, span)
    return client


def test_all_spans_are_asked_for_in_one_round_trip_and_claimed_by_any_process(
    node: RunningNode, client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, link = node.client(), client._link
    assert link is not None
    calls, call = list[m.Message](), link.call

    def counted(request: m.Message, *args: Any, **kwargs: Any) -> m.Answer:
        calls.append(request)
        return call(request, *args, **kwargs)

    monkeypatch.setattr(link, "call", counted)
    with client.spans(QUERIES) as held:
        assert [type(request) for request in calls] == [m.LookupSpans]
        assert [span.num_tokens for span in held] == list(range(43, 23, -1))
        for span in held:
            lease = worker.claim(span.hit.ticket)
            assert lease is not None
            with lease:
                check(lease, SPANS[span.number], span.num_tokens)
    assert held_by(worker) == NOTHING


def test_spans_of_a_late_answer_are_given_back(node: RunningNode, client: NodeClient) -> None:
    with node.stopped(), pytest.raises(DeadlineExceeded):
        client.spans(QUERIES, deadline_s=0.05)
    eventually(lambda: held_by(client) == NOTHING)
    with client.spans(QUERIES) as held:
        assert len(held) == 20


def test_spans_end_with_their_connection(node: RunningNode, client: NodeClient) -> None:
    other = node.client()
    held = client.spans(QUERIES)
    assert held_by(other)["tickets"] == 20
    client.close()
    eventually(lambda: held_by(other) == NOTHING)
    held.close()


def test_spans_come_from_another_node(fleet: Fleet) -> None:
    first = fleet.start("a", port=0)
    second = fleet.start("b", peers(port_of(first)))
    writer, reader = (joined(node, SPACE.of_spans) for node in (first, second))
    for span in SPANS[:3]:
        store(writer, span)

    def found() -> bool:
        with reader.spans(QUERIES[:4], wait_s=PATIENT_S) as held:
            if len(held) < 3:
                return False  # its events have not come yet
            for span in held:
                lease = reader.claim(span.hit.ticket)
                assert lease is not None
                with lease:
                    check(lease, SPANS[span.number], SPANS[span.number].num_tokens)
                assert span.hit.sources == {"peers": span.num_tokens}
                [loaded] = span.hit.loaded
                assert loaded.place == f"127.0.0.1:{port_of(first)}"
                assert loaded.chunks == [[0, 1]]
            return True

    eventually(found)
    eventually(lambda: held_by(reader) == NOTHING)
    counters = writer.status()["served_peers"]["counters"]
    assert counters["kvhold_peer_served_chunks{peer=127.0.0.1,result=sent}"] == 6
