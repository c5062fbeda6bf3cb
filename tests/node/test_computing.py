"""Two clients of one node that need the same chunks: one computes them, the other waits."""

import time
from threading import Thread

import msgspec
import pytest

from kvhold.core.api import Hit
from kvhold.core.errors import DeadlineExceeded, KVHoldError
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from kvhold.core.reasons import WHOLE
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, check, flood, store
from tests.node.nodes import SPACE, RunningNode, eventually

PROMPT = a_prompt(SPACE, 100)
INTENT = ComputeIntent(ComputeCost("request", 100, token_s=1.0))
NUM_CHUNKS = 7  # with the tail
HANDS_OVER = ComputeIntent(ComputeCost("request", 100), waits=False, keep_s=60.0)
HANDOVER = ComputeIntent(
    ComputeCost("request", 100),
    waits=False,
    announces=False,
    handover=HandoverWait(timeout_s=60.0, grace_s=60.0),
)


def lookup(client: NodeClient, *, intent: ComputeIntent = INTENT, wait_s: float = 0) -> Hit:
    client.register(SPACE)
    return client.lookup(PROMPT.query(), intent=intent, wait_s=wait_s)


def test_a_client_waits_for_chunks_that_another_one_computes(node: RunningNode) -> None:
    with node.client() as one, node.client() as two:
        first = lookup(one)
        assert not first.num_tokens

        def store_soon() -> None:
            time.sleep(0.05)
            store(one, PROMPT)

        storing = Thread(target=store_soon)
        storing.start()
        with first, lookup(two, wait_s=60) as hit:
            assert (hit.num_tokens, hit.reason, hit.waits) == (100, WHOLE, False)
            assert hit.take_announcement() is None
            lease = two.claim(hit.ticket)
            assert lease is not None
            with lease:
                check(lease, PROMPT, 100)
        storing.join()


@pytest.mark.parametrize("how", ["leaves", "is killed by a bad message"])
def test_a_wait_ends_when_the_other_client_goes(node: RunningNode, how: str) -> None:
    one, two = node.client(), node.client()
    first = lookup(one)
    with two, lookup(two) as hit:
        assert hit.waits
        if how == "leaves":
            one.close()
        else:
            assert one._link is not None
            one._link._socket.sendall(b"\xff" * 64)

        def has_arrived() -> bool:
            hit.refresh()
            return not hit.arriving

        eventually(has_arrived)
        announcement = hit.take_announcement()
        assert announcement is not None, "now this client computes them"
        announcement.close()
        assert two.status()["announced_chunks"] == 0
    first.close()
    one.close()


def test_a_late_answer_gives_its_announcement_back(node: RunningNode) -> None:
    with node.client() as one:
        one.register(SPACE)
        with node.stopped(), pytest.raises(DeadlineExceeded):
            one.lookup(PROMPT.query(), intent=INTENT, deadline_s=0.05)
        eventually(lambda: one.status()["announced_chunks"] == 0)
        assert one.status()["counters"]["kvhold_announced_chunks"] == 6


def test_a_client_waits_for_another_one_that_is_about_to_begin(node: RunningNode) -> None:
    with node.client() as one, node.client() as two:

        def compute_soon() -> None:
            time.sleep(0.05)
            with lookup(one):
                store(one, PROMPT)

        computing = Thread(target=compute_soon)
        computing.start()
        with lookup(two, intent=HANDOVER, wait_s=60) as hit:
            assert (hit.num_tokens, hit.reason) == (100, WHOLE)
        computing.join()


@pytest.mark.parametrize("seconds", [-1.0, 1e9, float("inf"), float("nan")])
def test_a_node_refuses_waits_and_pins_without_a_bound(node: RunningNode, seconds: float) -> None:
    with node.client() as one:
        handover = HandoverWait(timeout_s=seconds)
        for intent in (
            msgspec.structs.replace(HANDOVER, handover=handover),
            msgspec.structs.replace(HANDS_OVER, keep_s=seconds),
        ):
            with pytest.raises(KVHoldError):
                lookup(one, intent=intent)


def test_handed_over_chunks_stay_until_the_other_client_has_its_hit(node: RunningNode) -> None:
    with node.client() as one, node.client() as two:
        with lookup(one, intent=HANDS_OVER):
            store(one, PROMPT)
        flood(one, SPACE)
        assert two.status()["handover_chunks"] == NUM_CHUNKS
        with lookup(two, intent=HANDOVER) as hit:
            assert hit.num_tokens == 100
            assert two.status()["handover_chunks"] == 0
            flood(one, SPACE)
            lease = two.claim(hit.ticket)
            assert lease is not None
            with lease:
                check(lease, PROMPT, 100)
        eventually(lambda: two.status()["pinned_chunks"] == 0)
        flood(one, SPACE)
        with lookup(two) as hit:
            assert hit.num_tokens == 0


@pytest.mark.parametrize("how", ["leaves", "is killed by a bad message"])
def test_they_are_cache_like_any_other_when_the_client_goes(node: RunningNode, how: str) -> None:
    one = node.client()
    with node.client() as two:
        with lookup(one, intent=HANDS_OVER):
            store(one, PROMPT)
        assert two.status()["pinned_chunks"] == NUM_CHUNKS
        if how == "leaves":
            one.close()
        else:
            assert one._link is not None
            one._link._socket.sendall(b"\xff" * 64)
        eventually(lambda: two.status()["pinned_chunks"] == 0)
        with lookup(two) as hit:
            assert hit.num_tokens == 100
    one.close()


def test_a_deadline_passes_without_any_call(node: RunningNode) -> None:
    with node.client() as one:
        with lookup(one, intent=msgspec.structs.replace(HANDS_OVER, keep_s=0.05)):
            store(one, PROMPT)
        eventually(lambda: one.status()["pinned_chunks"] == 0)
        assert one.status()["counters"]["kvhold_handovers{result=deadline}"] == 1
