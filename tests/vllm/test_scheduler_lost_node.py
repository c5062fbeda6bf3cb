"""Under vLLM's real scheduler: a node that dies, stands still or restarts, and resets."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.integrations.vllm import lookups
from kvhold.integrations.vllm.request_state import RequestState
from tests.vllm.engines import (
    IMPATIENT,
    NOTHING,
    MakeEngine,
    Restart,
    engine,
    followed,
    forget_locally,
    frail,
    node,
    store,
)
from tests.vllm.scheduling import (
    WITHIN_S,
    Engine,
    NodeProcess,
    Options,
    answer_to,
    eventually,
    make_prompt,
)

__all__ = ["engine", "frail", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


class TestLostNode:
    @pytest.fixture
    def warm(self, folder: Path, frail: NodeProcess) -> Iterator[Engine]:
        warm = Engine(Options(folder, settings=IMPATIENT), frail.socket)
        store(warm, make_prompt("lost", 300))
        yield warm
        assert warm.followed() == 0
        warm.close()

    def check(self, warm: Engine, prompt: list[int], count: int = 8) -> None:
        """All requests are computed, and end."""
        for number in range(count):
            warm.add(f"{number}", [*prompt, number])
        warm.run()
        for number in range(count):
            assert warm.outputs[f"{number}"] == answer_to([*prompt, number], 2)

    def test_when_it_is_killed_requests_are_computed(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        frail.kill()
        self.check(warm, make_prompt("lost", 300))
        assert warm.loads == []

    def test_when_it_is_held_up_requests_are_computed_and_it_is_used_again_later(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        frail.hold_up()
        self.check(warm, make_prompt("lost", 300))
        assert warm.loads == []
        frail.go_on()
        eventually(
            lambda: warm.connector.scheduler._cache.connected and warm.hands.client.connected
        )
        forget_locally(warm)
        prompt = make_prompt("lost", 300)
        warm.add("back", prompt)
        warm.run()
        assert warm.tokens_computed["back"] == 300 - 288 + 1
        eventually(lambda: frail.held() == NOTHING)

    @pytest.fixture
    def restart(
        self, warm: Engine, frail: NodeProcess, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Restart]:
        """The node is killed, and another is being started."""
        restart = Restart(frail)
        restart.begin(warm, monkeypatch)
        yield restart
        restart.end(fail=True)

    def test_a_lookup_waits_for_the_next_one_if_computing_takes_longer(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(warm.connector.scheduler._costs, "compute_s", lambda *_: WITHIN_S)
        prompt = make_prompt("lost", 300)
        warm.add("a", prompt)
        lookup = eventually(
            lambda: not warm.step().total_num_scheduled_tokens and followed(warm, "a").lookup
        )
        lookup.result()
        assert followed(warm, "a").is_lost
        for _ in range(20):
            assert warm.step().total_num_scheduled_tokens == 0, (
                "it is asked again, and no pass waits"
            )
        restart.end()
        warm.run()
        assert warm.outputs["a"] == answer_to(prompt, 2)
        assert restart.missed == {"never_stored": 300}, "the next one has answered"

    def test_a_lookup_that_would_wait_longer_than_computing_does_not_and_others_wait(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        computed_in_s = {1: 0.0, 300: WITHIN_S}
        monkeypatch.setattr(
            warm.connector.scheduler._costs,
            "compute_s",
            lambda num_tokens, _: computed_in_s[num_tokens],
        )
        monkeypatch.setattr(lookups, "_START_S", WITHIN_S)
        long, short = make_prompt("lost", 300), make_prompt("lost", 1)
        warm.add("long", long)
        warm.add("short", short)
        eventually(lambda: warm.step() and restart.missed)
        assert restart.missed == {"not_awaited": 1}
        restart.end()
        warm.run()
        assert warm.outputs == {"long": answer_to(long, 2), "short": answer_to(short, 2)}
        assert restart.missed == {"not_awaited": 1, "never_stored": 300}

    def test_when_the_node_is_away_for_long_nobody_waits(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(warm.connector.scheduler._costs, "compute_s", lambda *_: 1e9)
        monkeypatch.setattr(warm.connector.scheduler._cache, "_lost_at_s", time.monotonic() - 3600)
        began_s = time.monotonic()
        warm.add("a", make_prompt("lost", 300))
        eventually(lambda: warm.step() and restart.missed)
        assert restart.missed == {"not_awaited": 300}
        assert (
            time.monotonic() - began_s
            < warm.connector.scheduler._config.client.arrival_timeout_s / 2
        ), "which is as long as any waits"
        warm.run()

    def test_where_the_start_has_failed_nobody_waits(
        self, warm: Engine, restart: Restart, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(warm.connector.scheduler._costs, "compute_s", lambda *_: 1e9)
        restart.end(fail=True)
        eventually(lambda: not warm.connector.scheduler._cache.is_rejoining)
        self.check(warm, make_prompt("lost", 300), count=2)
        assert restart.missed == {"no_answer": 602}

    def test_what_the_engine_has_itself_does_not_wait_for_it(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        prompt = make_prompt("lost", 300)
        warm.add("a", prompt)
        warm.run()
        frail.hold_up()
        request = warm.add("b", prompt)
        assert warm.step().num_scheduled_tokens == {request.request_id: 300 - 288}, (
            "in the very next pass"
        )
        warm.run()
        assert warm.outputs["b"] == answer_to(prompt, 2)
        frail.go_on()
        eventually(lambda: frail.held() == NOTHING)

    def test_when_it_dies_under_a_load_the_request_is_computed(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        prompt = make_prompt("lost", 300)
        warm.hands.hold = True
        warm.add("a", prompt)
        warm.run(until=lambda: warm.hands.waiting)
        frail.kill()
        warm.hands.hold = False
        warm.run()
        assert len(warm.hands.gone) == 1
        assert warm.outputs["a"] == answer_to(prompt, 2)

    def test_when_another_took_its_place_a_hit_of_the_first_is_not_one_of_the_second(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        prompt = make_prompt("lost", 300)
        warm.hands.hold = True
        warm.add("a", prompt)
        warm.run(until=lambda: warm.hands.waiting)
        frail.kill()
        second = NodeProcess(frail.socket)
        try:
            eventually(
                lambda: warm.hands.client.connected and warm.connector.scheduler._cache.connected
            )
            other = Engine(Options(warm.options.folder), second.socket)
            store(other, make_prompt("something else", 300))
            warm.hands.hold = False
            warm.run()
            assert warm.outputs["a"] == answer_to(prompt, 2)
            other.close()
            eventually(lambda: second.held() == NOTHING)
        finally:
            second.kill()

    def test_one_pass_waits_for_all_its_lookups_together_not_for_each(
        self, warm: Engine, frail: NodeProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever waits uses up the patience of the whole pass."""
        side, patience = warm.connector.scheduler, []

        def resolve(followed: RequestState, patience_s: float) -> bool:
            patience.append(patience_s)
            return real(followed, patience_s)

        real = side.lookups.resolve
        monkeypatch.setattr(side.lookups, "resolve", resolve)
        frail.hold_up()
        for number in range(400):
            warm.add(f"{number}", make_prompt(number, 20), max_tokens=1)
        warm.step()
        assert len(patience) > 10
        assert patience[0] == lookups._PATIENCE_S
        assert sum(left > 0 for left in patience) < 5, "the first has waited for nearly all of it"
        monkeypatch.undo()
        warm.run()

    def test_lookups_that_nobody_waits_for_any_more_are_not_made(
        self, warm: Engine, frail: NodeProcess
    ) -> None:
        frail.hold_up()
        for number in range(50):
            warm.add(f"{number}", make_prompt(number, 100))
        warm.step()
        pending = [
            followed.lookup
            for followed in warm.connector.scheduler._request_states.values()
            if followed.lookup is not None and not followed.lookup.done()
        ]
        warm.abort(*map(str, range(50)))
        assert len(pending) > 10
        assert sum(lookup.cancelled() for lookup in pending) >= len(pending) - 1
        warm.run()


class TestReset:
    def test_nothing_of_before_is_found_by_anybody_who_was_reset(self, engine: MakeEngine) -> None:
        reset = engine()
        prompts = {None: make_prompt("reset", 300), "salt": make_prompt("reset salted", 300)}
        for salt, prompt in prompts.items():
            reset.add(f"first {salt}", prompt, cache_salt=salt)
            reset.run()
        assert reset.scheduler.reset_prefix_cache(reset_connector=True)
        for salt, prompt in prompts.items():
            reset.add(f"second {salt}", prompt, cache_salt=salt)
            reset.run()
        assert reset.loads == []
        forget_locally(reset)
        reset.add("third", prompts[None])
        reset.run()
        assert len(reset.loads) == 1, "what was stored since then is"

    def test_a_hit_that_a_waiting_request_has_is_given_up(
        self, engine: MakeEngine, node: NodeProcess
    ) -> None:
        tight = engine(num_blocks=41)
        prompt = make_prompt("reset waiting", 320)
        store(tight, prompt)
        tight.add("large", make_prompt("reset large", 600), max_tokens=3)
        tight.next_pass()
        tight.add("a", prompt)
        tight.step()
        eventually(lambda: node.held()["tickets"] == 1)
        tight.scheduler.reset_connector_cache()
        tight.run()
        assert [load for load in tight.loads if load.request_id == "a"] == []
        assert tight.tokens_computed["a"] == 320 + 1

    def test_what_was_begun_before_is_not_stored_after(self, engine: MakeEngine) -> None:
        reset = engine(budget=100)
        reset.add("a", make_prompt("reset running", 300))
        reset.next_pass()
        reset.scheduler.reset_connector_cache()
        reset.stores.clear()
        reset.run()
        assert reset.stores == []

    def test_others_do_not_find_what_is_stored_after_a_reset(self, engine: MakeEngine) -> None:
        """The weights may be others since then."""
        updated, original = engine(), engine()
        updated.scheduler.reset_connector_cache()
        prompt = make_prompt("updated", 300)
        store(updated, prompt)
        original.add("a", prompt)
        original.run()
        assert original.loads == []

    def test_it_succeeds_without_a_node(self, folder: Path, frail: NodeProcess) -> None:
        lone = Engine(Options(folder, settings=IMPATIENT), frail.socket)
        frail.kill()
        assert lone.scheduler.reset_connector_cache()
        lone.close()
