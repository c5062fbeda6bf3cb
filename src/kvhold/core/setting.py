"""One setting: the field that declares it, and its value from text."""

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints
from urllib.parse import urlencode

from kvhold.core.errors import ConfigError
from kvhold.core.sizes import parse_size

Settings = TypeVar("Settings")


def size(default: int, help: str) -> Any:
    """Accepts "5GiB", too."""
    return field(default=default, metadata={"help": help, "size": True, "minimum": 0})


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    pairs: bool = False,
) -> Any:
    """A secret value is never in errors, logs and status.

    pairs: a list of NAME=VALUE, also accepted as a table
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "secret": secret,
            "pairs": pairs,
        },
        repr=not secret,
    )


def apply(
    config: Settings, values: Mapping[str, Any], *, source: str, spell: Any = None, path: str = ""
) -> Settings:
    """spell: turns a dotted name into the source's spelling"""
    spell = spell or (lambda name: name)
    types = get_type_hints(type(config))
    known = {f.name: f for f in fields(config)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{path}{name}"
        if name not in known:
            raise unknown_setting(spell(dotted), [spell(f"{path}{k}") for k in known], source)
        current = getattr(config, name)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{source}: {spell(dotted)} is a section of settings, not a "
                    f"{type(value).__name__}"
                )
            changes[name] = apply(current, value, source=source, spell=spell, path=f"{dotted}.")
        else:
            try:
                changes[name] = _convert(value, types[name], known[name].metadata)
            except ValueError as error:
                shown = "..." if known[name].metadata.get("secret") else repr(value)
                raise ConfigError(f"{source}: {spell(dotted)} = {shown}: {error}") from None
    return type(config)(**{f: changes.get(f, getattr(config, f)) for f in known})


def unknown_setting(name: str, known: list[str], source: str) -> ConfigError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return ConfigError(f"{source}: there is no setting {name!r}; {hint}")


def _convert(value: Any, kind: Any, rules: Mapping[str, Any]) -> Any:
    if rules.get("size"):
        value = parse_size(value)
    elif kind is bool:
        value = _as_bool(value)
    elif kind in (int, float):
        value = _as_number(value, kind)
    elif kind == float | None:
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            return None
        value = _as_number(value, float)
    elif kind == tuple[str, ...]:
        is_table = rules.get("pairs") and isinstance(value, Mapping)
        value = _as_pairs(value) if is_table else _as_lines(value)
    elif kind == tuple[int, ...]:
        value = _as_ids(value)
    elif kind is str and not isinstance(value, str):
        raise ValueError("must be text")
    for item in value if isinstance(value, tuple) else (value,):
        _check_choice(item, rules.get("choices"))
    if rules.get("minimum") is not None and value < rules["minimum"]:
        raise ValueError(f"must be at least {rules['minimum']}")
    if rules.get("maximum") is not None and value > rules["maximum"]:
        raise ValueError(f"must be at most {rules['maximum']:g}")
    return value


def _check_choice(value: Any, choices: tuple[str, ...] | None) -> None:
    if choices and value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        raise ValueError(
            f"must be one of {', '.join(choices)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )


def _as_pairs(table: Mapping[Any, Any]) -> tuple[str, ...]:
    for name, text in table.items():
        if not isinstance(text, str):
            raise ValueError(f"the value of {name!r} must be text")
    return tuple(f"{name}={text}" for name, text in table.items())


def _as_lines(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list, or text with spaces between its items")
    return tuple(_as_line(item, number) for number, item in enumerate(value, 1))


def _as_line(item: Any, number: int) -> str:
    if isinstance(item, str) and item and not set(item) & set(" \t\n"):
        return item
    if isinstance(item, Mapping) and isinstance(item.get("url"), str):
        options = {
            name: ("true" if v else "false") if isinstance(v, bool) else v
            for name, v in item.items()
            if name != "url"
        }
        if not options:
            return _as_line(item["url"], number)
        return _as_line(
            f"{item['url']}{'&' if '?' in item['url'] else '?'}{urlencode(options)}", number
        )
    raise ValueError(
        f"item {number} is neither text without spaces (write %20 in a URL) nor a table with a url"
    )


def _as_ids(value: Any) -> tuple[int, ...]:
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ValueError("must be a list of whole numbers, or text with spaces between them")
    numbers = tuple(int(_as_number(item, int)) for item in items)
    if any(number < 0 for number in numbers):
        raise ValueError("no number may be negative")
    return numbers


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ValueError("must be true or false")


def _as_number(value: Any, kind: type[int] | type[float]) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("must be a number")
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a whole number" if kind is int else "must be a number") from None
    if kind is int and isinstance(value, float) and value != number:
        raise ValueError("must be a whole number")
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError("must be a finite number")
    return number
