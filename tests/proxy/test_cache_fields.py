"""What the cache settings of clients ask for, and what is wrong with bad ones."""

from typing import Any

import msgspec
import pytest

from kvhold.proxy import cache_fields
from kvhold.proxy.cache_fields import BadCacheSetting, KeptPrefix, read_cache_settings
from kvhold.proxy.prompts import Fields

MESSAGES, CHAT, COMPLETIONS = "/v1/messages", "/v1/chat/completions", "/v1/completions"
SHORT = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
EXPLICIT = {"mode": "explicit"}


def read(path: str, body: dict[str, Any]) -> tuple[KeptPrefix, ...]:
    return read_cache_settings(path, msgspec.json.decode(msgspec.json.encode(body), type=Fields))


def whole(field: str, ttl: str, ttl_s: int) -> KeptPrefix:
    path = "/v1/messages/count_tokens" if "cache_control" in field else "/tokenize"
    return KeptPrefix(field, ttl, ttl_s, path)


def text(words: str, mark: Any = None, name: str = "cache_control") -> dict[str, Any]:
    return {"type": "text", "text": words} | ({} if mark is None else {name: mark})


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def counted(prefix: KeptPrefix) -> Any:
    assert prefix.count is not None
    return msgspec.json.decode(prefix.count)


class TestAnthropic:
    def test_the_last_block_is_the_whole_prompt(self) -> None:
        body = {"system": [text("s", SHORT)], "messages": [user(text("a"), text("b", SHORT))]}
        assert read(MESSAGES, body) == (whole("messages.0.content.1.cache_control", "5m", 300),)

    def test_automatic_caching_is_the_whole_prompt(self) -> None:
        body = {"system": "s", "messages": [user(text("a"))], "cache_control": HOUR}
        assert read(MESSAGES, body) == (whole("cache_control", "1h", 3600),)

    def test_each_ttl_has_its_longest_prefix(self) -> None:
        body = {
            "model": "m",
            "max_tokens": 5,
            "stream": True,
            "tools": [{"name": "t", "cache_control": HOUR}],
            "system": [text("s", HOUR), text("more")],
            "messages": [user(text("a", SHORT), text("b"))],
            "cache_control": SHORT,
        }
        long, short = read(MESSAGES, body)
        assert (long.field, long.ttl_s) == ("system.0.cache_control", 3600)
        assert counted(long) == {
            "model": "m",
            "tools": body["tools"],
            "system": [text("s", HOUR)],
            "messages": [{"role": "user", "content": "."}],
        }
        assert short == whole("cache_control", "5m", 300)

    @pytest.mark.parametrize(
        ("body", "field", "cut"),
        [
            (
                {"tools": [{"name": "a", "cache_control": SHORT}, {"name": "b"}], "system": "s"},
                "tools.0.cache_control",
                {"tools": [{"name": "a", "cache_control": SHORT}], "system": "s"},
            ),
            (
                {"messages": [user(text("a", SHORT), text("b")), user(text("c"))]},
                "messages.0.content.0.cache_control",
                {"messages": [user(text("a", SHORT))]},
            ),
            (
                {
                    "messages": [
                        user({"type": "tool_result", "content": [text("a", SHORT), text("b")]}),
                        user("c"),
                    ]
                },
                "messages.0.content.0.content.0.cache_control",
                {
                    "messages": [
                        user({"type": "tool_result", "content": [text("a", SHORT), text("b")]})
                    ]
                },
            ),
        ],
    )
    def test_a_prefix_is_counted_by_the_request_up_to_its_breakpoint(
        self, body: dict[str, Any], field: str, cut: dict[str, Any]
    ) -> None:
        question = {"messages": [{"role": "user", "content": "."}]}
        [prefix] = read(MESSAGES, {"messages": [user("x")], **body})
        assert prefix.field == field
        assert counted(prefix) == {**question, **cut}

    @pytest.mark.parametrize(
        "body",
        [
            {"messages": [user(text("a"))]},
            {"messages": [user(text("a", None))], "cache_control": None},
            {"messages": [user(text('say "cache_control"'))]},
            {"messages": "cache_control", "tools": {"cache_control": 1}},
            {"messages": [{"role": "user", "content": "a"}, 5, None], "system": 7},
        ],
    )
    def test_without_a_breakpoint_nothing_is_kept(self, body: dict[str, Any]) -> None:
        assert read(MESSAGES, body) == ()

    @pytest.mark.parametrize(
        ("body", "complaint"),
        [
            (
                {"system": [text("a", {"type": "ephemeral", "ttl": "2h"})]},
                "system.0.cache_control.ttl: must be '5m' or '1h'",
            ),
            ({"cache_control": {"type": "forever"}}, 'cache_control.type: must be "ephemeral"'),
            ({"cache_control": "5m"}, 'cache_control.type: must be "ephemeral"'),
            (
                {"tools": [{"cache_control": {"type": "ephemeral", "ttl": 5}}]},
                "tools.0.cache_control.ttl: must be",
            ),
            (
                {"system": [text("a", SHORT)], "messages": [user(text("b", HOUR))]},
                'content.0.cache_control.ttl: "1h" may not come after the "5m" of system.0.cache',
            ),
            (
                {"messages": [user(*(text(str(n), SHORT) for n in range(5)))]},
                "messages.0.content.4.cache_control: this is the breakpoint number 5, of 4 at most",
            ),
            (
                {
                    "messages": [user(*(text(str(n), SHORT) for n in range(4)), text("x"))],
                    "cache_control": SHORT,
                },
                "cache_control: this is the breakpoint number 5, of 4 at most",
            ),
            (
                {"messages": [user(text("a", HOUR))], "cache_control": SHORT},
                "cache_control.ttl: the last block has '1h'",
            ),
        ],
    )
    def test_a_bad_setting_is_named(self, body: dict[str, Any], complaint: str) -> None:
        with pytest.raises(BadCacheSetting) as error:
            read(MESSAGES, body)
        assert complaint in str(error.value)

    def test_automatic_caching_of_a_marked_last_block_is_no_further_breakpoint(self) -> None:
        blocks = [text(str(n), SHORT) for n in range(4)]
        assert len(read(MESSAGES, {"messages": [user(*blocks)], "cache_control": SHORT})) == 1


class TestOpenAI:
    @pytest.mark.parametrize(
        ("settings", "kept"),
        [
            ({}, []),
            ({"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, []),
            ({"prompt_cache_options": {"mode": "explicit"}}, []),
            ({"prompt_cache_options": {}}, [("prompt_cache_options", "30m", 1800)]),
            ({"prompt_cache_options": {"ttl": "12h"}}, [("prompt_cache_options", "12h", 43_200)]),
            ({"prompt_cache_retention": "24h"}, [("prompt_cache_retention", "24h", 86_400)]),
            (
                {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
                [("prompt_cache_retention", "24h", 86_400)],
            ),
        ],
    )
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
    def test_options_and_retention_keep_the_whole_prompt(
        self, path: str, settings: dict[str, Any], kept: list[tuple[str, str, int]]
    ) -> None:
        body = {"prompt": "p", "messages": [user(text("a"))], **settings}
        assert list(read(path, body)) == [whole(*one) for one in kept]

    def test_breakpoints_are_prefixes(self) -> None:
        marked = text("a", EXPLICIT, "prompt_cache_breakpoint")
        body = {
            "model": "m",
            "messages": [user(marked, text("b")), user(text("c"))],
            "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
        }
        [prefix] = read(CHAT, body)
        assert prefix.field == "messages.0.content.0.prompt_cache_breakpoint"
        assert (prefix.ttl_s, prefix.count_path) == (43_200, "/tokenize")
        assert counted(prefix) == {
            "model": "m",
            "messages": [user(marked)],
            "add_generation_prompt": False,
        }

    def test_a_breakpoint_has_its_own_ttl(self) -> None:
        marked = text("a", {"mode": "explicit", "ttl": "12h"}, "prompt_cache_breakpoint")
        body = {"messages": [user(marked, text("b"))], "prompt_cache_options": {}}
        assert [one.ttl for one in read(CHAT, body)] == ["12h", "30m"]

    def test_the_latest_breakpoints_count(self) -> None:
        long = text("a", {"mode": "explicit", "ttl": "12h"}, "prompt_cache_breakpoint")
        short = text("b", EXPLICIT, "prompt_cache_breakpoint")
        body = {"messages": [user(long, short, short, short)], "prompt_cache_options": EXPLICIT}
        assert [one.ttl for one in read(CHAT, body)] == ["12h", "30m"]
        body["prompt_cache_options"] = {"mode": "implicit"}
        assert [one.ttl for one in read(CHAT, body)] == ["30m"]

    def test_many_breakpoints_cost_no_more_than_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = []

        def cut(others: Any, messages: Any, number: int, part: int) -> dict[str, Any]:
            numbers.append(part)
            return {}

        monkeypatch.setattr(cache_fields, "_cut_messages", cut)
        marked = text("a", EXPLICIT, "prompt_cache_breakpoint")
        assert len(read(CHAT, {"messages": [user(*[marked] * 1000), user("b")]})) == 1
        assert numbers == [999]

    @pytest.mark.parametrize(
        ("settings", "complaint"),
        [
            ({"prompt_cache_key": 7}, "prompt_cache_key: must be text"),
            ({"prompt_cache_options": "30m"}, "prompt_cache_options: must be an object"),
            ({"prompt_cache_options": {"ttl": "5m"}}, "options.ttl: must be '30m' or '12h'"),
            ({"prompt_cache_options": {"mode": []}}, "mode: must be 'implicit' or 'explicit'"),
            ({"prompt_cache_retention": "7d"}, "prompt_cache_retention: must be 'in_memory' or"),
            (
                {"messages": [user(text("a", {"mode": "auto"}, "prompt_cache_breakpoint"))]},
                'messages.0.content.0.prompt_cache_breakpoint.mode: must be "explicit"',
            ),
            (
                {"messages": [user(text("a", True, "prompt_cache_breakpoint"))]},
                "messages.0.content.0.prompt_cache_breakpoint.mode: must be",
            ),
        ],
    )
    def test_a_bad_setting_is_named(self, settings: dict[str, Any], complaint: str) -> None:
        with pytest.raises(BadCacheSetting) as error:
            read(CHAT, settings)
        assert complaint in str(error.value)
