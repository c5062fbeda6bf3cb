"""Anthropic's and OpenAI's own clients with cache settings, before the proxy and engines. Their
usage reconciles with what engines computed, and what is kept survives pressure.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import pytest

pytest.importorskip("anthropic", reason="anthropic is not installed here: make setup")

import anthropic
import openai

from kvhold.node.start import end_node
from kvhold_lab.engines.engine import options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.servers.proxy import ProxyProcess
from tests.browsing import Page, browser
from tests.node.nodes import eventually

__all__ = ["browser"]

pytestmark = [pytest.mark.vllm, pytest.mark.alone]

PATIENT_S = 600.0
CONNECTOR = {
    "kv_connector": "KVHoldConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "hints": {"actions": "retain"},
        "rules": {"wait_for_computing": True},
    },
}
MODEL_LEN = 2_048
WORDS = "the quick brown fox jumps over a lazy dog and runs away "
SHORT: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
OPTIONS: Any = {"mode": "implicit", "ttl": "30m"}
CONTINUED = ("answer", "question " * 100)


@dataclass(frozen=True)
class Used:
    """Tokens of a prompt, by the client. hints: the engine's answers to retains"""

    prompt: int
    read: int
    created: int
    hints: Any = None

    @property
    def computed(self) -> int:
        return self.prompt - self.read


@dataclass
class Computed:
    """Tokens of prompts, by an engine's own metrics."""

    server: OpenAIServer
    prompt: float = 0
    computed: float = 0

    def read(self) -> tuple[float, float]:
        metrics = self.server.metrics()
        sums = [
            sum(value for name, value in metrics.items() if name.startswith(wanted))
            for wanted in ("vllm:prompt_tokens_total{", "vllm:prompt_tokens_by_source_total{")
        ]
        computed = sum(
            value
            for name, value in metrics.items()
            if name.startswith("vllm:prompt_tokens_by_source_total{") and "local_compute" in name
        )
        assert sums[0] == sums[1]
        return sums[0], computed

    def mark(self) -> None:
        self.prompt, self.computed = self.read()

    def assert_is(self, used: Used) -> None:
        """The requests since `mark` are those of `used`."""

        def reconciles() -> bool:
            prompt, computed = self.read()
            found = (prompt - self.prompt, computed - self.computed)
            return found == (used.prompt, used.computed)

        eventually(reconciles)


Ask = Callable[[str, str, tuple[str, ...]], Used]


class Clients:
    """They ask with cache settings, for a conversation of user, assistant, user and so on."""

    def __init__(self, url: str) -> None:
        self.anthropic = anthropic.Anthropic(
            base_url=url, api_key="x", max_retries=0, timeout=PATIENT_S
        )
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=PATIENT_S
        )

    def messages(self, system: str, text: str, more: tuple[str, ...] = ()) -> Used:
        answer = self.anthropic.messages.create(**self._messages(system, text, more))
        return of_messages(answer.usage, answer)

    def message_stream(self, system: str, text: str, more: tuple[str, ...] = ()) -> Used:
        arguments = self._messages(system, text, more)
        with self.anthropic.messages.stream(**arguments) as stream:
            [first] = [event.message for event in stream if event.type == "message_start"]
            used = of_messages(stream.get_final_message().usage)
        assert of_messages(first.usage).prompt == used.prompt
        return used

    def chat(self, system: str, text: str, more: tuple[str, ...] = ()) -> Used:
        answer = self.openai.chat.completions.create(**self._chat(system, text, more))
        return of_openai(answer.usage, answer)

    def chat_stream(self, system: str, text: str, more: tuple[str, ...] = ()) -> Used:
        arguments = self._chat(system, text, more)
        chunks = self.openai.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        [usage] = [chunk.usage for chunk in chunks if chunk.usage is not None]
        return of_openai(usage)

    def completion(self, system: str, text: str, more: tuple[str, ...] = ()) -> Used:
        answer = self.openai.completions.create(**self._completion(system, text, more))
        return of_openai(answer.usage, answer)

    def completion_stream(self, system: str, text: str, more: tuple[str, ...] = ()) -> Used:
        chunks = self.openai.completions.create(
            **self._completion(system, text, more),
            stream=True,
            stream_options={"include_usage": True},
        )
        [usage] = [chunk.usage for chunk in chunks if chunk.usage is not None]
        return of_openai(usage)

    def response(self, system: str, text: str, more: tuple[str, ...] = ()) -> Used:
        answer = self.openai.responses.create(
            model="demo",
            instructions=system,
            input=cast(Any, turns(text, more)),
            max_output_tokens=4,
            prompt_cache_options=OPTIONS,
        )
        usage = answer.usage
        assert usage is not None
        details = usage.input_tokens_details
        return Used(
            usage.input_tokens, details.cached_tokens, details.cache_write_tokens, hints_of(answer)
        )

    def _messages(self, system: str, text: str, more: tuple[str, ...]) -> dict[str, Any]:
        return {
            "model": "demo",
            "max_tokens": 4,
            "system": [{"type": "text", "text": system, "cache_control": HOUR}],
            "messages": turns(text, more),
            "cache_control": SHORT,
        }

    def _chat(self, system: str, text: str, more: tuple[str, ...]) -> dict[str, Any]:
        return {
            "model": "demo",
            "max_tokens": 4,
            "messages": [{"role": "system", "content": system}, *turns(text, more)],
            "prompt_cache_key": "key",
            "prompt_cache_options": OPTIONS,
        }

    def _completion(self, system: str, text: str, more: tuple[str, ...]) -> dict[str, Any]:
        """completions.create has no cache settings."""
        settings = {"prompt_cache_key": "key", "prompt_cache_options": OPTIONS}
        prompt = system + text + "".join(more)
        return {"model": "demo", "max_tokens": 4, "prompt": prompt, "extra_body": settings}


def turns(text: str, more: tuple[str, ...]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": words} for number, words in enumerate((text, *more))
    ]


def of_messages(usage: anthropic.types.Usage, answer: Any = None) -> Used:
    read = usage.cache_read_input_tokens or 0
    created = usage.cache_creation_input_tokens or 0
    if usage.cache_creation is not None:
        by_ttl = usage.cache_creation
        assert created == by_ttl.ephemeral_5m_input_tokens + by_ttl.ephemeral_1h_input_tokens
    return Used(usage.input_tokens + read + created, read, created, hints_of(answer))


def of_openai(usage: Any, answer: Any = None) -> Used:
    details = usage.prompt_tokens_details
    return Used(
        usage.prompt_tokens,
        details.cached_tokens,
        details.cache_write_tokens or 0,
        hints_of(answer),
    )


def hints_of(answer: Any) -> Any:
    return answer and ((answer.model_extra or {}).get("kv_transfer_params") or {}).get(
        "kvhold_hints"
    )


@dataclass
class Set:
    """servers: one that answers alone, or for the other's prefills; and the other
    chat:    URL of the chat page
    """

    servers: list[OpenAIServer]
    alone: Clients
    pairs: dict[str, Clients]
    chat: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Set]:
    folder, model = tmp_path_factory.mktemp("host"), make_model("tiny")
    options = options_for(
        model, max_model_len=MODEL_LEN, num_threads=1, kv_transfer_config=CONNECTOR
    )
    environment = {
        "XDG_RUNTIME_DIR": str(folder),
        "KVHOLD_RAM_BYTES": "64MiB",
        "KVHOLD_HINTS_MAX_BYTES": "40MiB",
    }
    with ExitStack() as stack:
        stack.callback(end_node, folder / "kvhold" / "node.sock")
        servers = [
            OpenAIServer(options, environment=environment, log_path=folder / f"server{n}.log")
            for n in range(2)
        ]
        for server in servers:
            stack.callback(server.stop)
            server.start(PATIENT_S)
        first, second = (server.base_url.removesuffix("/v1") for server in servers)
        alone = stack.enter_context(ProxyProcess([], [first], KVHOLD_PROXY_CHAT="true"))
        pairs = {}
        for protocol, engine in (("shared", first), ("nixl", first), ("p2p", f"{first}?p2p=h:9")):
            settings = {"KVHOLD_PROXY_PROTOCOL": protocol, "KVHOLD_PROXY_SKIP_ANSWERED_S": "0"}
            process = ProxyProcess([engine], [second], **settings)
            pairs[protocol] = Clients(stack.enter_context(process).url)
        yield Set(servers, Clients(alone.url), pairs, f"{alone.url}/chat")


KINDS = [
    *("messages", "message_stream", "chat", "chat_stream"),
    *("completion", "completion_stream", "response"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_usage_reconciles_with_what_the_engine_computed(served: Set, kind: str) -> None:
    ask: Ask = getattr(served.alone, kind)
    engine = Computed(served.servers[0])
    system, text = f"{kind} " + WORDS * 20, WORDS * 10

    engine.mark()
    cold = ask(system, text, ())
    engine.assert_is(cold)
    assert cold.read == 0

    engine.mark()
    again = ask(system, text, ())
    engine.assert_is(again)
    assert again.prompt == cold.prompt
    assert again.read > again.prompt // 2

    engine.mark()
    longer = ask(system, text, CONTINUED)
    engine.assert_is(longer)
    assert longer.read >= again.read
    if not kind.startswith("completion"):  # where vLLM tells what it stored
        assert cold.created > cold.prompt // 2
        assert again.created == 0
        assert 0 < longer.created <= longer.computed
    if not kind.endswith("stream"):
        assert [hint["outcome"] for hint in longer.hints] == ["accepted"] * len(longer.hints)
        assert longer.hints[-1]["num_tokens"] >= longer.read


@pytest.mark.parametrize("kind", ["messages", "message_stream", "chat", "completion_stream"])
@pytest.mark.parametrize("protocol", ["shared", "nixl", "p2p"])
def test_what_the_prefill_engine_computed_is_not_called_cached(
    served: Set, kind: str, protocol: str
) -> None:
    ask: Ask = getattr(served.pairs[protocol], kind)
    prefill, decode = (Computed(server) for server in served.servers)
    system = f"{protocol} {kind} " + WORDS * 20

    prefill.mark()
    decode.mark()
    cold = ask(system, WORDS * 10, ())
    prefill.assert_is(cold)
    assert cold.read == 0
    decoded = decode.read()[1] - decode.computed
    assert decoded < cold.prompt // 2, "the prefill was handed over"

    prefill.mark()
    again = ask(system, WORDS * 10, ())
    prefill.assert_is(again)
    assert again.read > again.prompt // 2


def test_the_chat_page_shows_what_came_from_the_cache(served: Set, browser: Any) -> None:
    page, shown = Page(browser), []
    page.open(served.chat)
    page.until("#model", "demo")
    page.run(f"document.querySelector('#system').value = 'page {WORDS * 20}'")
    page.run("document.querySelector('#most').value = 20")
    for number, question in enumerate(("first", "second")):
        page.type("#text", f"{question}\n")
        footer = page.until(f"article:nth-of-type({2 * number + 2}) footer", "answered")
        found = re.search(r"(\d+) of (\d+) prompt tokens from the cache", footer)
        assert found is not None, footer
        shown.append((int(found[1]), int(found[2])))
    assert shown[0][0] == 0
    assert shown[1][0] > shown[1][1] // 2
    assert page.errors == []


# The tests below have salts, so that each has its own share of the memory for hints.


def press(clients: Clients, name: str) -> None:
    """Fill the node's memory and the engine's with other prompts."""
    for number in range(20):
        prompt = f"{name} {number} " + WORDS * 90
        clients.openai.completions.create(model="demo", prompt=prompt, max_tokens=1)


def test_what_a_breakpoint_of_anthropics_client_keeps_survives_pressure(served: Set) -> None:
    clients = served.alone

    def ask(name: str, question: str, mark: Any) -> Any:
        block: Any = {"type": "text", "text": f"{name} " + WORDS * 40, "cache_control": mark}
        return clients.anthropic.messages.create(
            model="demo",
            max_tokens=4,
            system=[block],
            messages=[{"role": "user", "content": question + WORDS * 20}],
            extra_body={"cache_salt": "breakpoints"},
        )

    kept = ask("kept", "first", HOUR)
    lost = ask("lost", "first", None)
    [hint] = hints_of(kept)
    assert hint["outcome"] == "accepted"
    num_kept = hint["num_tokens"]
    counted = clients.anthropic.messages.count_tokens(
        model="demo",
        system="kept " + WORDS * 40,
        messages=[{"role": "user", "content": "."}],
    ).input_tokens
    created = kept.usage.cache_creation
    assert created.ephemeral_1h_input_tokens == counted
    assert created.ephemeral_5m_input_tokens == 0
    assert 0 < num_kept <= counted < of_messages(kept.usage).prompt

    press(clients, "against breakpoints")
    engine = Computed(served.servers[0])
    engine.mark()
    used = of_messages(ask("kept", "second", HOUR).usage)
    engine.assert_is(used)
    assert used.read >= num_kept
    assert of_messages(ask("lost", "second", None).usage).read == 0
    assert lost.usage.cache_creation_input_tokens == 0


def test_what_openais_client_keeps_survives_pressure(served: Set) -> None:
    clients = served.alone

    def ask(name: str, question: str, mark: Any) -> Used:
        part: Any = {"type": "text", "text": f"{name} " + WORDS * 40} | mark
        answer = clients.openai.chat.completions.create(
            model="demo",
            max_tokens=4,
            messages=[
                {"role": "system", "content": [part]},
                {"role": "user", "content": question + WORDS * 20},
            ],
            prompt_cache_options={"mode": "explicit"},
            extra_body={"cache_salt": "options"},
        )
        return of_openai(answer.usage, answer)

    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    kept = ask("openai kept", "first", mark)
    [hint] = kept.hints
    assert hint["outcome"] == "accepted"
    assert hint["num_tokens"] <= kept.created < kept.prompt
    ask("openai lost", "first", {})

    press(clients, "against options")
    assert ask("openai kept", "second", mark).read >= hint["num_tokens"]
    assert ask("openai lost", "second", {}).read == 0


def test_bad_settings_are_errors_of_the_clients(served: Set) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"cache_control.ttl: must be '5m' or '1h'"):
        served.alone.anthropic.messages.create(
            model="demo",
            max_tokens=4,
            messages=[{"role": "user", "content": "a"}],
            cache_control=cast(Any, {"type": "ephemeral", "ttl": "2h"}),
        )
    with pytest.raises(openai.BadRequestError) as error:
        served.alone.openai.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "a"}],
            prompt_cache_options=cast(Any, {"ttl": "5m"}),
        )
    assert error.value.param == "prompt_cache_options.ttl"


def test_a_retain_that_is_clipped_or_rejected_fails_no_request(served: Set) -> None:
    outcomes = set[str]()
    for number in range(30):
        answer = served.alone.openai.completions.create(
            model="demo",
            prompt=f"limits {number} " + WORDS * 90,
            max_tokens=1,
            extra_body={"prompt_cache_retention": "24h", "cache_salt": "limits"},
        )
        [hint] = hints_of(answer)
        outcomes.add(hint["outcome"])
        assert hint["reason"]
        if hint["outcome"] == "rejected":
            break
    assert outcomes == {"clipped", "rejected"}  # 24 hours are more than hints.max_ttl_s
