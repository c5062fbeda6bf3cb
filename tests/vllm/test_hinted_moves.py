"""The hints `fetch` and `share` on real nodes, and all actions of a real vLLM."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.cli.prompts import query_of
from kvhold.core.hints import Hint, HintAction, HintAnswer
from kvhold.integrations.vllm import hinted_moves
from kvhold.integrations.vllm.hinted_moves import HintedMoves
from kvhold.node import NodeClient
from kvhold.node.namespaces import namespace_for_prompts
from kvhold.testing.cache import a_prompt, store
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.redis import RedisServer
from tests.node.fleets import Fleet, found_tokens, joined, peers, port_of
from tests.node.nodes import PATIENT_S, SPACE, eventually
from tests.vllm.hinting import ask, engine_on

pytestmark = pytest.mark.vllm

FETCH = Hint("f", "", HintAction.FETCH)
SHARE = Hint("s", "", HintAction.SHARE)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for node in fleet.nodes:
        node.close()


@pytest.fixture
def moves() -> Iterator[list[HintedMoves]]:
    made: list[HintedMoves] = []
    yield made
    for one in made:
        one.close()


def disk(folder: Path) -> str:
    return f"disk://{folder}/disk?max_bytes=64MiB"


def shared(folder: Path) -> str:
    (folder / "shared").mkdir(exist_ok=True)
    return f"fs://{folder}/shared"


def carried_out(client: NodeClient, hint: Hint, prompt: Any, made: list[HintedMoves]) -> HintAnswer:
    made.append(HintedMoves(client))
    assert made[-1].reserve()
    begin = made[-1].fetch if hint.action is HintAction.FETCH else made[-1].share
    answer = begin(hint, prompt.query(), prompt.num_tokens).result(PATIENT_S)
    assert client.status()["held"]["tickets"] == 0, "nothing stays pinned"
    return answer


def in_memory(client: NodeClient, prompt: Any) -> int:
    with client.lookup(prompt.query(), wait_s=0) as hit:
        return hit.sources.get("ram", 0)


def leave_memory(client: NodeClient, tier: str, query: Any) -> None:
    with client.copy(tier, query, drop=True) as copying:
        progress = copying.wait()
    assert progress.dropped == progress.copied > 0


class TestFetch:
    def test_from_a_disk_and_then_from_memory(
        self, fleet: Fleet, tmp_path: Path, moves: list[HintedMoves]
    ) -> None:
        client = joined(fleet.start("a", disk(tmp_path)))
        prompt = a_prompt(SPACE, 100)
        store(client, prompt)
        leave_memory(client, "disk", prompt.query())
        for place in ("disk", "ram"):
            answer = carried_out(client, FETCH, prompt, moves)
            assert (answer.outcome, answer.num_tokens) == ("accepted", 100)
            assert answer.sources == {place: 100}
            assert in_memory(client, prompt) == 100

    def test_from_a_named_tier_only(
        self, fleet: Fleet, tmp_path: Path, moves: list[HintedMoves]
    ) -> None:
        other = f"disk://{tmp_path}/other?max_bytes=64MiB&name=other"
        client = joined(fleet.start("a", disk(tmp_path), other))
        prompt = a_prompt(SPACE, 100)
        store(client, prompt)
        for tier in ("other", "disk"):
            assert client.flush(deadline_s=PATIENT_S)
            leave_memory(client, "disk", prompt.query())
            answer = carried_out(client, replace(FETCH, tier=tier), prompt, moves)
            assert (answer.outcome, answer.sources) == ("accepted", {tier: 100})
        assert moves[-1].has_tier("other") and not moves[-1].has_tier("nothing")

    def test_from_a_tier_without_it_nothing_comes(
        self, fleet: Fleet, tmp_path: Path, moves: list[HintedMoves]
    ) -> None:
        empty = f"disk://{tmp_path}/empty?max_bytes=64MiB&name=empty&read_only=true"
        client = joined(fleet.start("a", disk(tmp_path), empty))
        prompt = a_prompt(SPACE, 100)
        store(client, prompt)
        assert client.flush(deadline_s=PATIENT_S)
        leave_memory(client, "disk", prompt.query())
        answer = carried_out(client, replace(FETCH, tier="empty"), prompt, moves)
        assert (answer.outcome, in_memory(client, prompt)) == ("missing", 0)

    def test_from_a_peer(self, fleet: Fleet, moves: list[HintedMoves]) -> None:
        first = fleet.start("a", port=0)
        writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
        prompt, longer = a_prompt(SPACE, 96), a_prompt(SPACE, 200)
        assert carried_out(reader, FETCH, prompt, moves).outcome == "missing"
        store(writer, prompt)
        eventually(lambda: reader.status()["tiers"][0]["followed_peers"]["chunks"])
        answer = carried_out(reader, FETCH, longer, moves)
        assert (answer.outcome, answer.num_tokens) == ("clipped", 96)
        assert answer.sources == {"peers": 96}
        assert in_memory(reader, prompt) == 96


class TestShare:
    def test_to_a_shared_tier_where_another_host_finds_it(
        self, fleet: Fleet, tmp_path: Path, moves: list[HintedMoves]
    ) -> None:
        one = joined(fleet.start("a", disk(tmp_path), shared(tmp_path)))
        prompt = a_prompt(SPACE, 100)
        assert carried_out(one, SHARE, prompt, moves).outcome == "missing"
        store(one, prompt)
        for _ in range(2):
            answer = carried_out(one, SHARE, prompt, moves)
            assert (answer.outcome, answer.num_tokens) == ("accepted", 100)
            assert found_tokens(joined(fleet.start("b", shared(tmp_path))), prompt) == 100
            fleet.nodes.pop().close()

    def test_what_is_found_in_part_is_clipped(
        self, fleet: Fleet, tmp_path: Path, moves: list[HintedMoves]
    ) -> None:
        one = joined(fleet.start("a", shared(tmp_path)))
        store(one, a_prompt(SPACE, 96))
        answer = carried_out(one, SHARE, a_prompt(SPACE, 200), moves)
        assert (answer.outcome, answer.num_tokens) == ("clipped", 96)
        assert answer.reason == "only the first 96 tokens are found"

    def test_to_peers_it_is_shared_by_being_in_memory(
        self, fleet: Fleet, moves: list[HintedMoves]
    ) -> None:
        first = fleet.start("a", port=0)
        writer, reader = joined(first), joined(fleet.start("b", peers(port_of(first))))
        prompt = a_prompt(SPACE, 100)
        store(writer, prompt)
        assert carried_out(writer, SHARE, prompt, moves).outcome == "accepted"
        eventually(lambda: found_tokens(reader, prompt) == 100)

    def test_a_private_disk_is_no_place_to_share(self, fleet: Fleet, tmp_path: Path) -> None:
        one = HintedMoves(joined(fleet.start("a", disk(tmp_path))))
        assert not one.can_share()
        one.close()

    def test_a_tier_that_is_gone_is_no_share(self, fleet: Fleet, moves: list[HintedMoves]) -> None:
        with ExitStack() as running:
            try:
                server = running.enter_context(RedisServer())
            except NotInstalled as error:
                pytest.skip(str(error))
            one = joined(fleet.start("a", server.url))
            prompt = a_prompt(SPACE, 100)
            server.kill()
            store(one, prompt)
            answer = carried_out(one, SHARE, prompt, moves)
        assert answer.outcome == "rejected"
        assert "tier redis" in answer.reason


def test_moves_have_a_limit(
    fleet: Fleet, moves: list[HintedMoves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hinted_moves, "MOST_MOVES", 1)
    client = joined(fleet.start("a"))
    answer = carried_out(client, FETCH, a_prompt(SPACE, 100), moves)
    assert answer.outcome == "missing"
    assert moves[0].reserve(), "the place is free again"
    assert not moves[0].reserve()


def test_all_actions_of_a_real_engine_across_memory_disk_and_a_peer(
    fleet: Fleet, tmp_path: Path
) -> None:
    own = [10 + n % 200 for n in range(640)]
    theirs = [10 + (7 * n) % 200 for n in range(640)]
    fetch, share = {"action": "fetch"}, {"action": "share"}
    peer = fleet.start("peer", port=0)
    with engine_on(peer) as engine:
        # a node with no shared tier, which serves peers
        assert ask(engine, theirs, share)[0]["outcome"] == "deferred"
    node = fleet.start("own", disk(tmp_path), shared(tmp_path), peers(port_of(peer)))
    client = node.client()
    eventually(lambda: client.status()["tiers"][2]["followed_peers"]["chunks"] >= 10)
    with engine_on(node) as engine:
        nothing = {"action": "fetch", "outcome": "missing"}
        [answer] = ask(engine, own, fetch, store=False)
        assert {**answer, "reason": ""} == {**nothing, "reason": ""}
        assert ask(engine, theirs, fetch, store=False) == [
            {
                "action": "fetch",
                "outcome": "accepted",
                "num_tokens": 640,
                "sources": {"peers": 640},
            }
        ]
        pin = {"action": "pin", "ttl_s": 600}
        kept = {"action": "retain", "ttl_s": 600, "num_tokens": 64}
        answers = ask(engine, own, pin, kept, {"action": "prefetch"}, {"action": "demote"}, share)
        outcomes = {answer["action"]: answer["outcome"] for answer in answers}
        assert outcomes.pop("share") in ("deferred", "accepted")
        assert outcomes == {
            "pin": "accepted",
            "retain": "accepted",
            "prefetch": "deferred",
            "demote": "deferred",
        }
        namespace = client.names()[0][0].digest
        eventually(lambda: in_memory_of(client, namespace, own) == 640)
        done = {"action": "share", "outcome": "accepted", "num_tokens": 640}
        eventually(lambda: ask(engine, own, share) == [done])
        space = namespace_for_prompts(client, namespace.hex())
        other = joined(fleet.start("other", shared(tmp_path)), space)
        with other.lookup(query_of(client, namespace.hex(), own), wait_s=PATIENT_S) as hit:
            assert hit.sources == {"fs": 640}, "another host reads what was shared"
        [answer] = ask(engine, own, fetch | {"tier": "nothing"}, store=False)
        assert (answer["outcome"], answer["reason"]) == (
            "rejected",
            "tier: the node has no tier 'nothing'",
        )
        assert client.flush(deadline_s=PATIENT_S)

        def fetched(named: dict[str, str]) -> Any:
            """The answer, unless the request ended first."""
            eventually(lambda: client.status()["held"]["tickets"] == 0)
            leave_memory(client, "disk", query_of(client, namespace.hex(), theirs))
            [answer] = ask(engine, theirs, fetch | named, store=False)
            return answer if answer["outcome"] != "deferred" else None

        for named, place in (({"tier": "fs"}, "fs"), ({}, "disk")):
            answer = eventually(partial(fetched, named))
            assert (answer["outcome"], answer["sources"]) == ("accepted", {place: 640})
        [answer] = ask(engine, theirs, fetch, store=False)
        assert answer["sources"] == {"ram": 640}


def in_memory_of(client: NodeClient, namespace: bytes, prompt: list[int]) -> int:
    with client.lookup(query_of(client, namespace.hex(), prompt), wait_s=0) as hit:
        return hit.sources.get("ram", 0)
