"""Prompts as text and as chat messages: the tokens that transformers makes of them."""

import sys
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="no tokenizers in this environment: kvhold[control]")
pytest.importorskip("jinja2", reason="no jinja2 in this environment: kvhold[control]")

from kvhold.control.refusals import ControlRefusal
from kvhold.control.tokenizing import MOST_CHARACTERS, ChatMessage, PromptTokenizers
from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Namespace
from kvhold.testing.cache import PLAIN, store
from tests.control.models import TEMPLATE, WORDS, make_model
from tests.control.running import running_control
from tests.node.nodes import RunningNode

SPACE = Namespace("content:1", PLAIN, title="/models/one")
DIGITS = SPACE.digest.hex()
TEXT = 9 * WORDS + "<s> Grüße, 世界!\n"
CHAT = [("system", WORDS), ("user", f"  {TEXT}"), ("assistant", '"yes" & <no>'), ("user", "")]
MESSAGES = [{"role": role, "content": content} for role, content in CHAT]


def by_transformers(folder: Path) -> tuple[list[int], list[int]]:
    """The tokens of TEXT, and of MESSAGES."""
    transformers = pytest.importorskip("transformers", reason="no transformers in this environment")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(TEXT), tokenizer.encode(prompt, add_special_tokens=False)


async def chat_tokens(tokenizers: PromptTokenizers, messages: Any = CHAT) -> list[int]:
    chat = [ChatMessage(role, content) for role, content in messages]
    return await tokenizers.chat_tokens(SPACE, chat)


@pytest.mark.parametrize("inside", [False, True], ids=["file", "config"])
async def test_the_tokens_are_those_of_transformers(tmp_path: Path, inside: bool) -> None:
    folder = make_model(tmp_path / "model", inside=inside)
    text, chat = by_transformers(folder)
    for path in (folder, folder / "tokenizer.json"):
        tokenizers = PromptTokenizers([f"/models/one={path}"])
        assert await tokenizers.text_tokens(SPACE, TEXT) == text
        assert await chat_tokens(tokenizers) == chat
        tokenizers.close()
    assert len(text) > 100 and len(chat) > 100


async def test_the_models_name_wins_then_the_longest_digits(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    others = []
    for number in range(3):
        path = tmp_path / f"other{number}.json"
        path.write_text("{}")
        others.append(path)
    right = f"{DIGITS[:9].upper()}={folder}"
    for entries in (
        [f"{DIGITS[:8]}={others[0]}", right, f"{DIGITS[:4]}={others[1]}"],
        [f"{DIGITS}={others[0]}", f"/models/one={folder}", f"{DIGITS[:5]}={others[1]}"],
    ):
        tokenizers = PromptTokenizers(entries)
        assert await tokenizers.text_tokens(SPACE, WORDS)
        tokenizers.close()
    tokenizers = PromptTokenizers([f"{DIGITS[:3]}={folder}", f"/models/on={folder}"])
    with pytest.raises(ControlRefusal, match=r"'/models/one'.*control\.tokenizers"):
        await tokenizers.text_tokens(SPACE, WORDS)
    tokenizers.close()


def test_the_setting_is_a_table_or_a_list(tmp_path: Path) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text('[control.tokenizers]\n"org/one" = "/models/o ne"\n4f0c = "/models/two"\n')
    config = load_config(file=settings, environ={})
    assert config.control.tokenizers == ("org/one=/models/o ne", "4f0c=/models/two")
    environ = {"KVHOLD_CONTROL_TOKENIZERS": "org/one=/a 4f0c=/b"}
    assert load_config(environ=environ).control.tokenizers == ("org/one=/a", "4f0c=/b")
    settings.write_text('[control.tokenizers]\n"org/one" = 7\n')
    with pytest.raises(ConfigError, match=r"control\.tokenizers.*'org/one' must be text"):
        load_config(file=settings, environ={})


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("/models/one", "is not MODEL=PATH"),
        ("=/models/one", "is not MODEL=PATH"),
        ("one=org/one", "there is no file"),
        ("one={folder}", r"there is no file .*tokenizer\.json"),
    ],
)
def test_a_wrong_entry_is_told_at_the_start(tmp_path: Path, entry: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"control\.tokenizers: .*{told}"):
        PromptTokenizers([entry.format(folder=tmp_path)])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "no chat template"),
        ("{% if %}", "the chat template of"),
        ("{{ raise_exception('never') }}", "refuses them: never"),
        ("{{ messages.append(1) }}", "refuses them"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses them"),
        ("{{ cycler.__init__.__globals__['os'].getcwd() }}", "refuses them"),
        ("{{ 1 / 0 }}", "refuses them"),
        (
            "{% for a in range(99999) %}{{ messages }}{{ messages }}{{ messages }}{% endfor %}",
            f"more than {MOST_CHARACTERS} characters",
        ),
    ],
)
async def test_a_templates_fault_is_told(tmp_path: Path, template: str | None, told: str) -> None:
    tokenizers = PromptTokenizers([f"/models/one={make_model(tmp_path / 'model', template)}"])
    with pytest.raises(ControlRefusal, match=told) as refusal:
        await chat_tokens(tokenizers)
    assert refusal.value.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)
    assert await tokenizers.text_tokens(SPACE, WORDS), "text needs no template"
    tokenizers.close()


async def test_a_file_that_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    for number, content in enumerate(("{}", "[", '{"model": {"type": "BPE"}}', "\x00")):
        path = tmp_path / f"{number}.json"
        path.write_text(content)
        tokenizers = PromptTokenizers([f"/models/one={path}"])
        with pytest.raises(ControlRefusal, match=rf"control\.tokenizers: {path}") as refusal:
            await tokenizers.text_tokens(SPACE, WORDS)
        assert refusal.value.reason == "no_tokenizer"
        tokenizers.close()


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
async def test_a_missing_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    folder = make_model(tmp_path / "model")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "kvhold.control.chat", raising=False)
    tokenizers = PromptTokenizers([f"/models/one={folder}"])
    with pytest.raises(ControlRefusal, match=rf"{package} is not installed.*kvhold\[control\]"):
        await chat_tokens(tokenizers)
    tokenizers.close()


async def test_a_prompt_is_found_pinned_and_summed_by_its_text(
    node: RunningNode, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    text, chat = by_transformers(folder)
    client = node.client()
    client.register(SPACE)
    for tokens in (text, chat):
        store(client, SPACE.prompt(tokens))
    async with running_control(node.path, tokenizers=[f"/models/one={folder}"]) as control:
        prompts: list[tuple[dict[str, Any], list[int]]] = [
            ({"text": TEXT}, text),
            ({"messages": MESSAGES}, chat),
        ]
        for number, (given, tokens) in enumerate(prompts, 1):
            order: dict[str, Any] = {"namespace": DIGITS[:10]} | given
            status, found = await control.own("POST", "/v1/lookup", order)
            assert (status, found["num_tokens"]) == (200, len(tokens)), found
            assert await control.own("POST", "/v1/prefetch", order) == (200, {"begun": True})
            status, pin = await control.own("POST", "/v1/pins", order)
            assert (status, pin["number"], pin["num_tokens"]) == (201, number, len(tokens))
            _, sums = await control.own("POST", "/v1/checksums", order)
            _, by_tokens = await control.own(
                "POST", "/v1/checksums", {"namespace": DIGITS, "tokens": tokens}
            )
            assert sums == by_tokens and len(sums["chunks"]) == -(-len(tokens) // 16)
        order = {"namespace": DIGITS, "text": f"x{TEXT}"}
        _, found = await control.own("POST", "/v1/lookup", order)
        assert (found["num_tokens"], found["reason"]) == (0, "never_stored")


async def test_what_is_too_long_is_refused(node: RunningNode, tmp_path: Path) -> None:
    client = node.client()
    client.register(SPACE)
    folder = make_model(tmp_path / "model", TEMPLATE)
    async with running_control(node.path, tokenizers=[f"/models/one={folder}"]) as control:
        order: dict[str, Any] = {"namespace": DIGITS}
        too_long: list[dict[str, Any]] = [
            {"text": "a" * (MOST_CHARACTERS + 1)},
            {"messages": [{"role": "user", "content": "a" * (MOST_CHARACTERS + 1)}]},
            {"messages": 10_001 * [{"role": "user", "content": "a"}]},
            {"messages": [{"role": "u" * 101, "content": "a"}]},
            {"messages": [{"role": "nobody", "content": "a"}]},
            {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
        ]
        for given in too_long:
            for path in ("lookup", "prefetch", "pins", "checksums"):
                status, problem = await control.own("POST", f"/v1/{path}", order | given)
                assert (status, problem["reason"]) == (400, "bad_request"), problem
        assert (await control.own("GET", "/v1/pins"))[1] == {"pins": []}
