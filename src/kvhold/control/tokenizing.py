"""Tokens of texts and chat messages, in one thread with a short queue.

Tokenizers and chat templates are files (`control.tokenizers`). Nothing is downloaded.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvhold.control.refusals import ControlRefusal
from kvhold.core.errors import UNDECODABLE, ConfigError
from kvhold.core.keys import Namespace

if TYPE_CHECKING:
    from kvhold.control.chat import ChatTemplate

MOST_CHARACTERS = 4 << 20
MOST_MESSAGES = 10_000

_SETTING = "control.tokenizers"
_LEAST_DIGITS = 4
_MOST_WAITING = 16
_MOST_TOKENIZER_BYTES = 256 << 20
_MOST_CONFIG_BYTES = 16 << 20
_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """role: such as user"""

    role: Annotated[str, msgspec.Meta(max_length=100)]
    content: str


@dataclass(frozen=True)
class _Entry:
    name: str
    folder: Path
    file: Path


class PromptTokenizers:
    """One event loop."""

    def __init__(self, entries: Sequence[str]) -> None:
        """entries: NAME=PATH. Raises ConfigError."""
        self._entries = [_parse(entry) for entry in entries]
        self._loaded: dict[Path, _ModelTokenizer] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvhold-tokenizer")
        self._num_waiting = 0

    async def text_tokens(self, namespace: Namespace, text: str) -> list[int]:
        """With the special tokens that the model's tokenizer adds. Raises ControlRefusal."""
        return await self._run(namespace, lambda tokenizer: tokenizer.encode(text, special=True))

    async def chat_tokens(self, namespace: Namespace, messages: Sequence[ChatMessage]) -> list[int]:
        """With the prompt for the model's answer. Raises ControlRefusal."""
        return await self._run(namespace, lambda tokenizer: tokenizer.encode_chat(messages))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, namespace: Namespace, work: Callable[["_ModelTokenizer"], list[int]]
    ) -> list[int]:
        entry = self._entry_for(namespace)
        if self._num_waiting >= _MOST_WAITING:
            raise ControlRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "busy",
                f"{self._num_waiting} prompts wait for their tokens already",
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: work(self._tokenizer(entry))
            )
        finally:
            self._num_waiting -= 1

    def _entry_for(self, namespace: Namespace) -> _Entry:
        """The model's name wins, then the longest digits."""
        digits = namespace.digest.hex()
        of_digits = [
            entry
            for entry in self._entries
            if len(entry.name) >= _LEAST_DIGITS and digits.startswith(entry.name.lower())
        ]
        of_name = [entry for entry in self._entries if entry.name == namespace.title]
        found = of_name or sorted(of_digits, key=lambda entry: len(entry.name))
        if not found:
            model = namespace.title or digits[:16]
            raise _no_tokenizer(
                f"no tokenizer is set for {model!r}: add {model!r} with the model's folder to "
                f"{_SETTING}, or give the prompt as tokens"
            )
        return found[-1]

    def _tokenizer(self, entry: _Entry) -> "_ModelTokenizer":
        if entry.file not in self._loaded:
            self._loaded[entry.file] = _ModelTokenizer(entry)
        return self._loaded[entry.file]


class _ModelTokenizer:
    """One thread."""

    def __init__(self, entry: _Entry) -> None:
        """Raises ControlRefusal."""
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise _not_installed("tokenizers") from None
        self._entry = entry
        self._template: ChatTemplate | None = None
        raw = _read(entry.file, _MOST_TOKENIZER_BYTES)
        try:
            self._tokenizer = Tokenizer.from_buffer(raw)
        except Exception as error:  # noqa: BLE001 - the package raises no narrower class
            raise _no_tokenizer(f"{_SETTING}: {entry.file}: {str(error)[:200]}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """special: add special tokens. Raises ControlRefusal."""
        try:
            # unlike `encode`, it lets other threads run
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except Exception as error:  # noqa: BLE001 - the package raises no narrower class
            raise _bad(f"the text has no tokens: {str(error)[:200]}") from None
        tokens: list[int] = encoded.ids
        return tokens

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The template writes the special tokens. Raises ControlRefusal."""
        if self._template is None:
            self._template = self._read_template()
        try:
            text = self._template.render(msgspec.to_builtins(messages), MOST_CHARACTERS)
        except ValueError as error:
            raise _bad(f"messages: {error}") from None
        return self.encode(text, special=False)

    def _read_template(self) -> "ChatTemplate":
        try:
            from kvhold.control.chat import ChatTemplate
        except ModuleNotFoundError:
            raise _not_installed("jinja2") from None
        folder = self._entry.folder
        settings = _read_json(folder / _CONFIG)
        text: Any = settings.get("chat_template")
        if (folder / _TEMPLATE).exists():
            text = _read(folder / _TEMPLATE, _MOST_CONFIG_BYTES).decode(errors="replace")
        if isinstance(text, list):
            named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
            text = named.get("default")
        if not isinstance(text, str):
            raise _no_tokenizer(
                f"{_SETTING}: {folder} has no chat template, neither in {_TEMPLATE} nor in "
                f"{_CONFIG}; give the prompt as text or tokens"
            )
        try:
            return ChatTemplate(text, _special_tokens(settings))
        except ValueError as error:
            raise _no_tokenizer(f"{_SETTING}: the chat template of {folder}: {error}") from None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _parse(entry: str) -> _Entry:
    name, _, text = entry.partition("=")
    if not name or not text:
        raise ConfigError(f"{_SETTING}: {entry!r} is not MODEL=PATH")
    path = Path(text).expanduser().absolute()
    file = path / _TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{_SETTING}: {name}: there is no file {file}; name a model's folder, or a {_TOKENIZER}"
        )
    return _Entry(name, file.parent, file)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_read(path, _MOST_CONFIG_BYTES), type=dict[str, Any])
    except UNDECODABLE as error:
        raise _no_tokenizer(f"{_SETTING}: {path}: {str(error)[:200]}") from None


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise _no_tokenizer(f"{_SETTING}: cannot read {path}: {error.strerror}") from None
    if len(raw) > most:
        raise _no_tokenizer(f"{_SETTING}: {path} has more than {most} bytes")
    return raw


def _not_installed(package: str) -> ControlRefusal:
    return ControlRefusal(
        HTTPStatus.NOT_IMPLEMENTED,
        "no_tokenizer",
        f"the package {package} is not installed beside the API: pip install 'kvhold[control]'",
    )


def _no_tokenizer(detail: str) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.CONFLICT, "no_tokenizer", detail)


def _bad(detail: str) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.BAD_REQUEST, "bad_request", detail)
