"""Hand-overs between nodes that serve each other: one's client computes, the other's waits."""

from functools import partial

import pytest

from kvhold.core.api import Hit
from kvhold.core.keys import Namespace
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from kvhold.core.reasons import WHOLE
from kvhold.node import NodeClient
from kvhold.testing.cache import HYBRID, a_prompt, check, store
from tests.node.fleets import Fleet, fleet, joined, peers, port_of, served
from tests.node.nodes import PATIENT_S, SPACE, RunningNode, eventually

__all__ = ["fleet"]

WIDE = Namespace(model="wide", layout=HYBRID)
COST = ComputeCost("request", 100)
PRODUCES = ComputeIntent(COST, waits=False, keep_s=PATIENT_S)
NUM_CHUNKS = 6  # without the tail


def awaits(timeout_s: float = PATIENT_S, grace_s: float = 0.0) -> ComputeIntent:
    wait = HandoverWait(timeout_s, grace_s)
    return ComputeIntent(COST, waits=False, announces=False, handover=wait)


def pair(fleet: Fleet, namespace: Namespace) -> tuple[RunningNode, NodeClient, NodeClient]:
    """The prefill engine's node, its client, and one of the decode engine's node."""
    first = fleet.start("a", port=0)
    second = fleet.start("b", peers(port_of(first)))
    return first, joined(first, namespace), joined(second, namespace)


def waited(reader: NodeClient) -> dict[str, float]:
    begin = "kvhold_waited_for_computing{result="
    return {
        name.removeprefix(begin).removesuffix("}"): value
        for name, value in reader.status()["counters"].items()
        if name.startswith(begin)
    }


def refreshed(hit: Hit) -> Hit:
    hit.refresh()
    return hit


def has(hit: Hit, num_tokens: int) -> bool:
    return refreshed(hit).num_tokens == num_tokens


@pytest.mark.parametrize("namespace", [SPACE, WIDE], ids=["one group", "three groups"])
@pytest.mark.parametrize("is_first", [True, False], ids=["decode first", "prefill first"])
def test_chunks_are_taken_while_others_are_computed(
    fleet: Fleet, namespace: Namespace, is_first: bool
) -> None:
    _, writer, reader = pair(fleet, namespace)
    prompt = a_prompt(namespace, 100)
    if is_first:
        hit = reader.lookup(prompt.query(), intent=awaits(grace_s=PATIENT_S), wait_s=0)
        computing = writer.lookup(prompt.query(), intent=PRODUCES, wait_s=0)
    else:
        computing = writer.lookup(prompt.query(), intent=PRODUCES, wait_s=0)
        hit = reader.lookup(prompt.query(), intent=awaits(grace_s=PATIENT_S), wait_s=0)
    with computing, hit:
        for num in range(1, NUM_CHUNKS):
            store(writer, prompt.until(16 * num))
            if namespace is SPACE:  # other groups need their last chunks
                eventually(partial(has, hit, 16 * num))
            assert refreshed(hit).arriving
        # with the mark
        eventually(lambda: served(writer)["chunks"] == writer.status()["chunks"] + 1)
        store(writer, prompt)
        eventually(lambda: not refreshed(hit).arriving)
        assert (hit.num_tokens, hit.reason) == (100, WHOLE)
        lease = reader.claim(hit.ticket)
        assert lease is not None
        with lease:
            check(lease, prompt, 100)
    assert waited(reader) == {"stored": 1}
    eventually(lambda: served(writer)["chunks"] == writer.status()["chunks"])
    eventually(lambda: writer.status()["pinned_chunks"] == 0)


@pytest.mark.parametrize("how", ["withdrawn", "client gone", "node killed"])
def test_a_wait_ends_with_the_computing(fleet: Fleet, how: str) -> None:
    first, writer, reader = pair(fleet, SPACE)
    prompt = a_prompt(SPACE, 100)
    computing = writer.lookup(prompt.query(), intent=PRODUCES, wait_s=0)
    with reader.lookup(prompt.query(), intent=awaits(grace_s=PATIENT_S), wait_s=0) as hit:
        store(writer, prompt.until(32))
        eventually(partial(has, hit, 32))
        if how == "withdrawn":
            computing.close()
        elif how == "client gone":
            writer.close()
        else:
            first.kill()
        eventually(lambda: not refreshed(hit).arriving)
        assert hit.num_tokens == 32
    assert waited(reader) == {"ended": 1}


def test_a_wait_has_a_deadline(fleet: Fleet) -> None:
    _, writer, reader = pair(fleet, SPACE)
    prompt = a_prompt(SPACE, 100)
    store(writer, prompt.until(32))
    with (
        writer.lookup(prompt.query(), intent=PRODUCES, wait_s=0),
        reader.lookup(prompt.query(), intent=awaits(0.3, grace_s=0.3), wait_s=0) as hit,
    ):
        eventually(lambda: not refreshed(hit).arriving)
    assert hit.num_tokens in (0, 32), "the peer may not be followed yet"
    assert sum(waited(reader).values()) == 1
