"""Under vLLM's real scheduler: hints are carried out and answered, and cost no request."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvhold.core.api import RetainAnswer, RetainedPrompt
from kvhold.core.errors import NodeError
from kvhold.core.keys import Namespace, Query
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm import sessions, timed_retains
from kvhold.integrations.vllm.hinted_moves import NOWHERE
from kvhold.integrations.vllm.sessions import Sessions
from kvhold.integrations.vllm.stats import Tally
from kvhold.integrations.vllm.timed_retains import TimedRetains
from kvhold.node import NodeClient
from tests.vllm.engines import CHUNK, MakeEngine, asks, engine, forget_locally, node, tokens_held
from tests.vllm.scheduling import Engine, NodeProcess, eventually, make_prompt

__all__ = ["engine", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]

ALL = {"hints": {"actions": "pin retain prefetch demote", "sessions": True}}
PIN = {"action": "pin", "ttl_s": 600}


def status(engine: Engine) -> Any:
    return engine.connector.scheduler._cache.status()


def ask(engine: Engine, name: str, prompt: list[int], **fields: Any) -> list[dict[str, Any]]:
    """The answers to the hints of a request that is run to its end."""
    engine.add(name, prompt, max_tokens=2, **asks(**fields))
    engine.run()
    # the lookup thread has done what waited for the end
    engine.connector.scheduler._lookup_thread.submit(lambda: None).result()
    assert len(engine.connector.scheduler.hints) == 0
    forget_locally(engine)
    answers: list[dict[str, Any]] = engine.handed.get(name, {}).get("kvhold_hints", [])
    return answers


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Actions and outcomes that were counted, in order."""
    seen: list[tuple[str, ...]] = []
    add = Tally.add

    def count(tally: Tally, name: str, value: float, *labels: str) -> None:
        add(tally, name, value, *labels)
        if name == "hints":
            seen.append(labels)

    monkeypatch.setattr(Tally, "add", count)
    return seen


def demoted(engine: Engine) -> float:
    return float(status(engine)["counters"].get("kvhold_demoted_chunks", 0))


class TestActions:
    def test_a_pin_keeps_what_the_request_stores(
        self, engine: MakeEngine, counted: list[tuple[str, ...]]
    ) -> None:
        one = engine(settings=ALL)
        prompt = make_prompt("pinned", 300)
        assert ask(one, "a", prompt, hints=[{"id": "x", **PIN}]) == [
            {
                "field": "kv_transfer_params.kvhold.hints[0]",
                "id": "x",
                "action": "pin",
                "outcome": "accepted",
                "num_tokens": 288,
            }
        ]
        assert status(one)["retained_chunks"] == 5
        assert tokens_held(one, prompt) == 288
        assert counted == [("pin", "accepted")]

    @pytest.mark.parametrize(
        ("num_tokens", "kept"), [(CHUNK, CHUNK), (2 * CHUNK + 1, 2 * CHUNK), (10_000, 288)]
    )
    def test_a_pin_of_the_first_tokens_keeps_their_whole_chunks(
        self, engine: MakeEngine, num_tokens: int, kept: int
    ) -> None:
        one = engine(settings=ALL)
        [answer] = ask(
            one, "a", make_prompt("first", 300), hints=[PIN | {"num_tokens": num_tokens}]
        )
        assert (answer["outcome"], answer["num_tokens"]) == ("accepted", kept)
        assert status(one)["retained_chunks"] == -(-kept // CHUNK)

    def test_less_than_a_chunk_is_rejected(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        [answer] = ask(one, "a", make_prompt("few", 300), hints=[PIN | {"num_tokens": CHUNK - 1}])
        assert answer["outcome"] == "rejected"
        assert answer["reason"] == f"num_tokens is less than a chunk of {CHUNK} tokens"

    def test_a_longer_prompt_takes_over_from_its_prefix(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        released = "kvhold_retains{result=released}"
        before = status(one)["counters"].get(released, 0)
        prompt = make_prompt("grows", 500)
        for turn, length in enumerate((200, 300, 500)):
            [answer] = ask(one, str(turn), prompt[:length], hints=[PIN])
            assert answer["outcome"] == "accepted"
            assert status(one)["counters"].get(released, 0) - before == turn
        shorter = {"action": "pin", "ttl_s": 1}
        ask(one, "shorter", make_prompt("grows", 600), hints=[shorter])
        assert status(one)["counters"].get(released, 0) - before == 2
        assert tokens_held(one, prompt) == 496

    def test_a_retain_ends_by_its_time(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        hint = {"action": "retain", "ttl_s": 0.001}
        assert ask(one, "a", make_prompt("short", 300), hints=[hint])[0]["outcome"] == "accepted"
        eventually(lambda: status(one)["retained_chunks"] == 0)

    def test_what_is_too_long_is_clipped(self, engine: MakeEngine) -> None:
        hints = ALL["hints"] | {"max_ttl_s": 100}
        one = engine(settings={"hints": hints})
        [answer] = ask(one, "a", make_prompt("clipped", 300), hints=[PIN])
        assert answer["outcome"] == "clipped"
        assert answer["reason"] == "for 100 s, the most that hints.max_ttl_s allows"

    def test_more_than_the_share_of_memory_is_clipped_and_then_rejected(
        self, engine: MakeEngine
    ) -> None:
        one = engine(settings=ALL, num_blocks=400)
        outcomes = []
        for number in range(40):
            [answer] = ask(one, str(number), make_prompt(f"share {number}", 4000), hints=[PIN])
            outcomes.append(answer["outcome"])
            if answer["outcome"] == "rejected":
                assert answer["reason"] == "the limits of hints are reached"
                break
        assert outcomes[-2:] in (["clipped", "rejected"], ["accepted", "rejected"])
        chunk_bytes = one.connector.scheduler._namespace.layout.chunk_bytes(0, CHUNK)
        held = status(one)
        assert held["retained_chunks"] * chunk_bytes <= held["arena_bytes"] // 4

    def test_demote_waits_for_the_requests_end(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        before = demoted(one)
        [answer] = ask(one, "a", make_prompt("demoted", 300), hints=[{"action": "demote"}])
        assert (answer["outcome"], answer["reason"]) == ("deferred", "at the request's end")
        eventually(lambda: demoted(one) - before == 5)

    def test_prefetch_begins(self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Query] = []
        monkeypatch.setattr(NodeClient, "prefetch", lambda _, query: asked.append(query))
        one = engine(settings=ALL)
        prompt = make_prompt("fetched", 300)
        [answer] = ask(one, "a", prompt, hints=[{"action": "prefetch"}])
        assert answer["outcome"] == "deferred"
        assert asked == [one.connector.scheduler._namespace.prompt(prompt).query()]

    def test_a_pin_of_what_is_not_there_is_missing(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        prompt = make_prompt("missing", 300)
        [answer] = ask(one, "a", prompt, hints=[PIN], store=False)
        assert answer["outcome"] == "missing"
        assert status(one)["retained_chunks"] == 0

    @pytest.mark.parametrize("shape", ["kv_hints", "kv_hint"])
    def test_messages_of_routers_are_read(self, engine: MakeEngine, shape: str) -> None:
        one = engine(settings=ALL)
        prompt = make_prompt(f"router {shape}", 300)
        if shape == "kv_hints":
            action = KvHintAction("1", "kv.pin", "1.0", {"ttl_s": 600})
            one.add("a", prompt, kv_hints=KvHintsEnvelope("0.1", "m", [action]))
        else:
            fetch = {
                "action_id": "1",
                "action_type": "kv.fetch",
                "action_version": "1.0",
                "payload": {"source_control_endpoint": "tcp://h:1", "block_hashes": [1]},
            }
            message = {"protocol_version": "0.1", "message_id": "m", "actions": [fetch]}
            extra = {"kv_transfer_params": {"kv_hint": message}}
            one.add("a", prompt, sampling={"extra_args": extra})
        one.run()
        [answer] = one.handed["a"]["kvhold_hints"]
        assert answer["id"] == "1"
        assert answer["outcome"] == ("accepted" if shape == "kv_hints" else "rejected")
        assert shape == "kv_hints" or "no place is taken from a request" in answer["reason"]

    def test_a_share_without_a_place_to_share_is_rejected(self, engine: MakeEngine) -> None:
        one = engine(settings={"hints": {"actions": "share fetch"}})
        prompt = make_prompt("shared", 300)
        [answer] = ask(one, "a", prompt, hints=[{"action": "share"}])
        assert (answer["outcome"], answer["reason"]) == ("rejected", NOWHERE)


class TestRefusals:
    def test_nothing_is_allowed_by_default(self, engine: MakeEngine) -> None:
        one = engine()
        [answer] = ask(one, "a", make_prompt("default", 300), hints=[PIN], session_id="s")
        assert answer["outcome"] == "rejected"
        assert "hints.actions" in answer["reason"]
        assert status(one)["retained_chunks"] == 0
        assert one.stores, "the request is cached as any other"

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"hints": [{"action": "pin"}]}, "ttl_s: it is missing"),
            ({"hints": 5}, "kv_transfer_params.kvhold.hints: 5 must be a list"),
            ({"session_id": 5}, "session_id: 5 must be text"),
            ({"hints": [PIN], "store": False, "load": False}, "the request is not cached"),
            ({"hints": [PIN], "no_rule": 1}, "the request is not cached"),
        ],
    )
    def test_bad_ones_are_answered(
        self,
        engine: MakeEngine,
        counted: list[tuple[str, ...]],
        fields: dict[str, Any],
        reason: str,
    ) -> None:
        one = engine(settings=ALL)
        [answer] = ask(one, "a", make_prompt(f"bad {reason}", 200), **fields)
        assert answer["outcome"] == "rejected"
        assert reason in answer["reason"]
        assert len(one.outputs["a"]) == 2
        assert counted in ([("unknown", "rejected")], [("pin", "rejected")])

    def test_a_prompt_without_a_whole_chunk_is_not_kept(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        [answer] = ask(one, "a", make_prompt("tiny", CHUNK - 1), hints=[PIN])
        assert answer["reason"] == f"the prompt is shorter than a chunk of {CHUNK} tokens"

    def test_a_faulty_node_costs_only_the_hint(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise NodeError("the test says so")

        for name in ("retain", "prefetch", "demote"):
            monkeypatch.setattr(NodeClient, name, fail)
        one = engine(settings=ALL)
        hints = [PIN, {"action": "prefetch"}, {"action": "demote"}]
        answers = ask(one, "a", make_prompt("faulty", 300), hints=hints)
        assert [answer["outcome"] for answer in answers] == ["rejected", "rejected", "deferred"]
        assert len(one.outputs["a"]) == 2

    def test_an_unexpected_error_costs_only_the_hint(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(NodeClient, "retain", lambda *_: 1 / 0)
        one = engine(settings=ALL)
        [answer] = ask(one, "a", make_prompt("broken", 300), hints=[PIN])
        assert answer["reason"] == "an error in kvhold"

    def test_an_engine_that_cannot_carry_them_out_says_why(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        one.connector.scheduler.hints.refusal = "the engine's workers are on several hosts"
        [answer] = ask(one, "a", make_prompt("hosts", 300), hints=[PIN], session_id="s")
        assert answer["reason"] == "the engine's workers are on several hosts"
        assert status(one)["retained_chunks"] == 0

    def test_pins_end_with_the_engine(self, engine: MakeEngine, node: NodeProcess) -> None:
        one, other = engine(settings=ALL), engine()
        ask(one, "a", make_prompt("leaving", 300), hints=[PIN])
        one.close()
        eventually(lambda: status(other)["retained_chunks"] == 0)


class TestSessions:
    def test_a_newer_turn_supersedes_the_older(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        before = demoted(one)
        first = make_prompt("session", 320)
        retain = {"action": "retain", "until": "superseded"}
        [answer] = ask(one, "1", first, hints=[retain], session_id="s")
        assert answer["outcome"] == "accepted"
        assert status(one)["retained_chunks"] == 5
        second = first[:192] + make_prompt("another answer", 256)
        [answer] = ask(one, "2", second, hints=[retain], session_id="s")
        assert status(one)["retained_chunks"] == 7, "the first turn's retain has ended"
        assert demoted(one) - before == 2, "chunks that only the first turn needs"
        ask(one, "3", second, session_id="s", end_session=True)
        assert status(one)["retained_chunks"] == 0
        assert demoted(one) - before == 2

    def test_the_session_of_another_tenant_is_another(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL)
        before, first = demoted(one), make_prompt("tenants", 320)
        ask(one, "1", first, session_id="s")
        ask(one, "2", first[:192] + make_prompt("x", 128), session_id="s", tags={"tenant": "b"})
        assert demoted(one) == before

    def test_generated_tokens_are_a_part_of_a_turn(self, engine: MakeEngine) -> None:
        one = engine(settings=ALL | {"save_decode": True})
        before, first = demoted(one), make_prompt("thinking", 256)
        one.add("1", first, max_tokens=130, **asks(session_id="s"))
        one.run()
        ask(one, "2", first + make_prompt("without thoughts", 128), session_id="s")
        eventually(lambda: demoted(one) - before == 2)

    def test_an_idle_session_is_demoted_and_loaded_when_told(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[Query] = []
        monkeypatch.setattr(NodeClient, "prefetch", lambda _, query: loaded.append(query))
        one = engine(settings=ALL)
        before, turn = demoted(one), make_prompt("idle", 320)
        ask(one, "1", turn, session_id="s")
        tell = make_prompt("tell", 5)
        hint: dict[str, Any] = {"action": "demote", "target": "session"}
        [answer] = ask(one, "2", tell, hints=[hint], session_id="s")
        assert answer["outcome"] == "accepted"
        assert demoted(one) - before == 5
        hint["action"] = "prefetch"
        [answer] = ask(one, "3", tell, hints=[hint], session_id="s")
        assert answer["outcome"] == "deferred"
        assert loaded == [one.connector.scheduler._namespace.prompt(turn).query()]
        [answer] = ask(one, "4", tell, hints=[hint], session_id="another")
        assert (answer["outcome"], answer["reason"]) == ("missing", "the session is not known")
        ask(one, "5", tell, session_id="s", end_session=True)
        [answer] = ask(one, "6", tell, hints=[hint], session_id="s")
        assert answer["outcome"] == "missing", "it has ended"

    def test_sessions_are_off_by_default(self, engine: MakeEngine) -> None:
        one = engine(settings={"hints": {"actions": "retain"}})
        before, first = demoted(one), make_prompt("off", 320)
        retain = {"action": "retain", "until": "superseded"}
        [answer] = ask(one, "1", first, hints=[retain], session_id="s")
        assert "hints.sessions" in answer["reason"]
        ask(one, "2", first[:192] + make_prompt("y", 128), session_id="s")
        assert demoted(one) == before


_GROUP = Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8")
SPACE = Namespace("model", Layout(groups=(_GROUP,), tokens_per_chunk=4, tail_tokens=1))


def query_of(*tokens: int) -> Query:
    return SPACE.prompt(list(tokens)).query()


class TestTimedRetains:
    def retained(self, num_tokens: int) -> RetainedPrompt:
        return RetainedPrompt(RetainAnswer(1, num_tokens, 0), lambda: None)

    def test_prompts_that_differ_in_their_tail_are_both_kept(self) -> None:
        known = TimedRetains()
        first, again, other = (self.retained(6) for _ in range(3))
        assert known.add(query_of(1, 2, 3, 4, 5, 6), first, 60, 4) == []
        assert known.add(query_of(1, 2, 3, 4, 7, 8), other, 60, 4) == []
        assert known.add(query_of(1, 2, 3, 4, 5, 6), again, 60, 4) == [first]

    def test_a_clipped_retain_covers_only_what_it_keeps(self) -> None:
        known = TimedRetains()
        first, clipped = self.retained(8), self.retained(4)
        known.add(query_of(*range(8)), first, 60, 4)
        assert known.add(query_of(*range(12)), clipped, 60, 4) == []
        assert known.add(query_of(*range(12)), self.retained(0), 60, 4) == []
        assert known.add(query_of(*range(12)), self.retained(8), 60, 4) == [clipped, first]

    def test_what_is_known_has_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timed_retains, "_MOST_RETAINS", 3)
        now_s = [0.0]
        known = TimedRetains(lambda: now_s[0])
        for number in range(50):
            known.add(query_of(*[number] * 4), self.retained(4), 3, 4)
            now_s[0] += 1
            assert len(known) <= 3
        now_s[0] -= 1
        assert known.add(query_of(*[49] * 4), self.retained(4), 3, 4) != []


class TestTurns:
    def test_a_continued_turn_leaves_nothing_but_its_tail(self) -> None:
        known = Sessions()
        assert known.begin("s", query_of(*range(10)))[1] is None
        _, superseded = known.begin("s", query_of(*range(22)))
        assert superseded is not None
        assert superseded.first_chunk == 2
        assert superseded.has_chunks
        assert superseded.query.tail_lengths

    def test_a_repeated_turn_leaves_nothing(self) -> None:
        known = Sessions()
        known.begin("s", query_of(*range(10)))
        _, superseded = known.begin("s", query_of(*range(10)))
        assert superseded is not None
        assert not superseded.has_chunks

    def test_a_branch_supersedes_nothing(self) -> None:
        known = Sessions()
        known.begin("s", query_of(*range(40)))
        assert known.begin("s", query_of(*range(16), *range(100, 140)))[1] is None
        _, superseded = known.begin("s", query_of(*range(16), *range(100, 160)))
        assert superseded is not None
        assert superseded.query.hashes == query_of(*range(16), *range(100, 140)).hashes

    def test_a_prompt_without_a_chunk_supersedes_nothing(self) -> None:
        known = Sessions()
        known.begin("s", query_of(1, 2))
        assert known.begin("s", query_of(1, 2, 3))[1] is None

    def test_the_oldest_branch_is_forgotten(self) -> None:
        known = Sessions()
        for branch in range(sessions._MOST_BRANCHES + 1):
            known.begin("s", query_of(*[branch] * 8))
        assert known.begin("s", query_of(*[0] * 8))[1] is None
        assert known.begin("s", query_of(*[4] * 8))[1] is not None

    def test_a_forgotten_branchs_retains_end_with_the_session(self) -> None:
        known = Sessions()
        ends: list[int] = []
        for branch in range(sessions._MOST_BRANCHES + 1):
            turn, _ = known.begin("s", query_of(*[branch] * 8))
            answer = RetainAnswer(branch + 1, 8, 8)
            turn.retains.append(RetainedPrompt(answer, partial(ends.append, branch)))
        for retained in known.end("s", SPACE.digest):
            retained.close()
        assert sorted(ends) == list(range(sessions._MOST_BRANCHES + 1))

    @pytest.mark.parametrize("limit", ["_MOST_SESSIONS", "_MOST_CHUNKS"])
    def test_what_is_known_has_a_limit(self, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sessions, limit, 3)
        known = Sessions()
        for name in range(50):
            turn, _ = known.begin(str(name), query_of(*range(8)))
            known.extend(str(name), turn, query_of(*range(12)))
            assert len(known) <= 3
            assert known._num_chunks == sum(
                turn.num_chunks for one in known._sessions.values() for turn in one.turns
            )
        known.end("49", SPACE.digest)
        known.end("49", SPACE.digest)
        assert known.begin("49", query_of(*range(12)))[1] is None
