"""Values of LMCache's settings, and what becomes of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvhold.core.errors import ConfigError

_GIB = 1 << 30


@dataclass
class Migration:
    """settings: kvhold's, as in a settings file
    notes:    a sentence for each of LMCache's settings, by its name
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def section(self, name: str) -> dict[str, Any]:
        section: dict[str, Any] = self.settings.setdefault(name, {})
        return section

    def as_toml(self) -> str:
        """Return a settings file, with the notes as comments."""
        lines = [f"# {_plain(name)}: {_plain(text)}" for name, text in self.notes.items()]
        lines += ["", *_toml_lines(self.settings)]
        for name, section in self.settings.items():
            if isinstance(section, dict):
                lines += ["", f"[{name}]", *_toml_lines(section)]
        return "\n".join(lines).strip() + "\n"


def extra_config(values: Mapping[str, Any]) -> dict[str, Any]:
    extra = values.get("extra_config") or {}
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError as error:
            raise ConfigError(f"extra_config is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"extra_config must hold names and values, not a {type(extra).__name__}")
    return extra


def is_on(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def number_of(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < 1 << 40:
        raise ConfigError(f"{name} = {value!r}: must be a number of 0 or more")
    return number


def whole_number(name: str, value: Any) -> int:
    number = number_of(name, value)
    if number != int(number):
        raise ConfigError(f"{name} = {value!r}: must be a whole number")
    return int(number)


def gib_bytes(name: str, value: Any) -> int:
    return int(number_of(name, value) * _GIB)


def size_text(num_bytes: int) -> str:
    for unit, factor in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def query_of(options: list[str]) -> str:
    return "?" + "&".join(options) if options else ""


def with_query(url: str, options: list[str]) -> str:
    return url + (query_of(options).replace("?", "&") if "?" in url else query_of(options))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _toml_lines(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {json.dumps(value)}"
        for name, value in values.items()
        if not isinstance(value, dict)
    ]
