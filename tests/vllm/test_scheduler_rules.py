"""Under vLLM's real scheduler: rules, and what requests say about the cache."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.node import NodeClient
from tests.vllm.engines import MakeEngine, asks, engine, forget_locally, node, store
from tests.vllm.scheduling import eventually, make_prompt

__all__ = ["engine", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


class TestRules:
    def test_what_is_not_to_be_stored_is_not_and_what_is_there_is_loaded(
        self, engine: MakeEngine
    ) -> None:
        one = engine()
        prompt = make_prompt("rules store", 300)
        one.add("a", prompt, **asks(store=False))
        one.run()
        assert one.stores == []
        forget_locally(one)
        store(one, prompt)
        one.add("b", [*prompt, 5], **asks(store=False))
        one.run()
        assert one.tokens_computed["b"] == 301 - 288 + 1
        assert one.stores == []

    def test_a_lookup_says_which_chunks_it_uses(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[str] = []
        look_up = NodeClient.lookup

        def heard_too(client: NodeClient, *args: Any, uses: Any, **kwargs: Any) -> Any:
            heard.append(uses)
            return look_up(client, *args, uses=uses, **kwargs)

        monkeypatch.setattr(NodeClient, "lookup", heard_too)
        one, consumer = engine(), engine(role="kv_consumer")
        one.add("a", make_prompt("uses a", 100))
        one.run()
        one.add("b", make_prompt("uses b", 100), **asks(store=False))
        one.run()
        consumer.add("c", make_prompt("uses c", 100))
        consumer.run()
        assert heard == ["all", "known", "known"]
        tight = engine(num_blocks=48, caching=False)
        for name in "abc":
            tight.add(name, make_prompt(f"uses tight {name}", 200), max_tokens=100)
        tight.run()
        assert heard[3:] == ["all"] * 3 + ["none"] * (len(heard) - 6)
        assert len(heard) > 6, "one was preempted"

    def test_what_is_not_to_be_loaded_is_computed_and_not_stored_twice(
        self, engine: MakeEngine
    ) -> None:
        one = engine()
        prompt = make_prompt("rules load", 300)
        store(one, prompt)
        one.hands.granted_chunks = 0
        one.add("a", prompt, **asks(load=False))
        one.run()
        assert one.loads == []
        assert one.tokens_computed["a"] == 300 + 1
        assert one.hands.granted_chunks == 0, "the node has it already"
        other = make_prompt("rules load other", 300)
        one.add("b", other, **asks(load=False))
        one.run()
        assert one.hands.granted_chunks == 5

    @pytest.mark.parametrize(
        ("settings", "asked", "ttl_s"),
        [(0, 50, 50.0), (30, None, 30.0), (30, 50, 30.0), (30, 20, 20.0), (0, None, None)],
    )
    def test_a_time_to_live_goes_with_what_is_stored(
        self, engine: MakeEngine, settings: float, asked: float | None, ttl_s: float | None
    ) -> None:
        one = engine(settings={"rules": {"ttl_s": settings}})
        one.add(
            "a",
            make_prompt(f"rules ttl {settings} {asked}", 300),
            **asks(**({} if asked is None else {"ttl_s": asked})),
        )
        one.run()
        assert one.stores
        assert {each.store_options.ttl_s for each in one.stores} == {ttl_s}

    def test_what_has_outlived_its_time_is_computed_again(self, engine: MakeEngine) -> None:
        one = engine(real_worker=True)
        prompt = make_prompt("rules ttl over", 300)
        one.add("a", prompt, **asks(ttl_s=0.5))
        one.run()
        numbers = iter(range(1000))

        def computed_whole() -> bool:
            forget_locally(one)
            one.add(name := f"again {next(numbers)}", prompt, **asks(store=False))
            one.run()
            return one.tokens_computed[name] == 300 + 1

        eventually(computed_whole)

    def test_tags_must_match(self, engine: MakeEngine) -> None:
        one = engine()
        prompt = make_prompt("rules tags", 300)
        tagged = asks(tags={"tenant": "a"})
        one.add("a", prompt, **tagged)
        one.run()
        computed = {}
        for name, rules in (("none", {}), ("other", asks(tags={"tenant": "b"})), ("same", tagged)):
            forget_locally(one)
            one.add(name, prompt, **rules)
            one.run()
            computed[name] = one.tokens_computed[name]
        assert computed == {"none": 301, "other": 301, "same": 300 - 288 + 1}

    @pytest.mark.parametrize(
        "rules", [{"stor": False}, {"store": "no"}, {"ttl_s": -1}, {"tags": "a"}], ids=str
    )
    def test_a_request_that_is_not_understood_is_computed_and_not_cached(
        self, engine: MakeEngine, rules: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        one = engine()
        prompt = make_prompt("rules nonsense", 300)
        store(one, prompt)
        one.add("a", prompt, **asks(**rules))
        one.run()
        assert one.tokens_computed["a"] == 300 + 1
        assert (one.stores, one.loads) == ([], [])

    def test_a_request_that_allows_less_than_the_engines_codec_loses_is_computed_and_counted(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = engine(settings={"memory_codec": "int8"})
        prompt = make_prompt("rules of a codec", 300)
        refused: list[str] = []
        monkeypatch.setattr(
            one.connector.scheduler.tally, "add", lambda name, value, label="": refused.append(name)
        )
        one.add("strict", prompt, **asks(max_error=0.001))
        one.run()
        assert (one.stores, one.loads) == ([], [])
        assert refused == ["refused_requests"]
        one.add("lenient", prompt, **asks(max_error=0.01))
        one.run()
        assert one.stores

    def test_a_request_that_names_another_tenant_than_the_engines_is_computed_and_counted(
        self, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = engine(settings={"rules": {"tenant": "acme"}})
        prompt = make_prompt("rules of a tenant", 300)
        store(one, prompt)
        refused: list[str] = []
        monkeypatch.setattr(
            one.connector.scheduler.tally, "add", lambda name, value, label="": refused.append(name)
        )
        one.add("other", prompt, **asks(tags={"tenant": "victim"}))
        one.run()
        assert one.tokens_computed["other"] == 300 + 1
        assert (one.stores, one.loads) == ([], [])
        assert refused == ["refused_requests"]
        one.add("same", prompt, **asks(tags={"tenant": "acme"}))
        one.run()
        assert one.tokens_computed["same"] == 300 - 288 + 1

    def test_what_the_settings_forbid_no_request_may(self, engine: MakeEngine) -> None:
        one, forbidden = engine(), engine(settings={"rules": {"store": False, "load": False}})
        prompt = make_prompt("rules forbidden", 300)
        store(one, prompt)
        for name, text in (("a", prompt), ("b", make_prompt("rules forbidden too", 300))):
            forbidden.add(name, text, **asks(store=True, load=True))
            forbidden.run()
            assert forbidden.tokens_computed[name] == 300 + 1
        assert (forbidden.stores, forbidden.loads) == ([], [])
