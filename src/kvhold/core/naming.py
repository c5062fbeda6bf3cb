"""Facts: the named parts of a namespace, for comparisons.

Every field of a configuration is a fact unless a table lists it as harmless: an unknown one only
costs a miss.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

import msgspec

from kvhold.core.encoding import canonical
from kvhold.core.errors import LayoutError, ProtocolError

MAX_TEXT = 4096
"""A longer text is replaced by its digest, unquoted, so it equals no other text."""
MAX_DESCRIPTION_BYTES = 64 << 10
MAX_UNPACKED_BYTES = 4 << 20

_MAX_DEPTH = 12
_PLAIN = (str, int, float, bytes, list, tuple, set, frozenset)
_SECRET = re.compile(
    r"(token|secret|passw\w*|credentials?|api_?key|access_?key\w*|auth\w*|private_?key)$",
    re.IGNORECASE,
)
_SECRET_INSIDE = re.compile(
    r"(token|secret|passw\w*|credentials?|api_?key|access_?key\w*|authori\w*|private_?key)'?\s*[:=]\s*'|://[^/'\s]*@",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Table:
    named: frozenset[str]
    harmless: Mapping[str, str]

    @classmethod
    def of(cls, named: str = "", harmless: Mapping[str, str] | None = None) -> "Table":
        """harmless: reason -> names, separated by spaces"""
        reasons = {
            name: reason for reason, names in (harmless or {}).items() for name in names.split()
        }
        table = cls(frozenset(named.split()), reasons)
        assert not table.named & reasons.keys(), (
            f"both named and harmless: {table.named & reasons.keys()}"
        )
        return table

    def __or__(self, other: "Table") -> "Table":
        return Table(self.named | other.named, {**self.harmless, **other.harmless})


@dataclass(frozen=True)
class NamingRules:
    """tables: by class name; the nearest base class applies
    opens: whether a class is split into attributes
    atoms: functions that give the text of a type
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    opens: Callable[[type], bool] = lambda kind: False
    atoms: Mapping[type, Callable[[Any], str]] = field(default_factory=dict)
    not_keys: frozenset[str] = frozenset()
    shared: tuple[str, ...] = ()

    def harmless(self, kind: type, name: str) -> bool:
        tables = (self.tables.get(base.__name__) for base in kind.__mro__)
        return any(table is not None and name in table.harmless for table in tables)


_PLAIN_VALUES = NamingRules()


@dataclass(frozen=True)
class Facts:
    items: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, found: Mapping[str, str]) -> "Facts":
        return cls(tuple(sorted(found.items())))

    @cached_property
    def digest(self) -> bytes:
        if not self.items:
            return b""
        return blake2b(
            canonical(["kvhold-facts-1", [list(item) for item in self.items]]), digest_size=32
        ).digest()

    def without(self, left_out: Callable[[str], bool]) -> "Facts":
        return Facts(tuple(item for item in self.items if not left_out(item[0])))


NO_FACTS = Facts()


def walk(value: Any, name: str, rules: NamingRules, found: dict[str, str], depth: int = 0) -> None:
    """Add facts to `found`. Raises LayoutError for a value that is not plain."""
    if name in rules.shared:
        return
    if not _is_open(value, rules):
        found[name] = text_of(value, name, rules, depth)
        return
    _check_depth(name, depth)
    found[name] = _class_name(type(value))
    for field_name, item in _fields_of(value, rules):
        walk(item, f"{name}.{field_name}", rules, found, depth + 1)


def text_of(value: Any, name: str, rules: NamingRules = _PLAIN_VALUES, depth: int = 0) -> str:
    """Digest of a text longer than MAX_TEXT. Only equal values of one type have equal texts."""
    text = _text(value, name, rules, depth)
    if len(text) <= MAX_TEXT:
        return text
    return (
        f"blake2b of {len(text)} characters: "
        f"{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
    )


def _text(value: Any, name: str, rules: NamingRules, depth: int) -> str:
    _check_depth(name, depth)
    for kind in type(value).__mro__:
        if kind in rules.atoms:
            return rules.atoms[kind](value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return repr(kind(value))  # a subclass's own repr is arbitrary
    if isinstance(value, bytes):
        return repr(bytes(value))
    if value is None:
        return "None"
    if isinstance(value, PurePath):
        return f"Path({str(value)!r})"
    if isinstance(value, (list, tuple)):
        tuple_name = _class_name(type(value)) if hasattr(value, "_fields") else ""
        items = (_text(item, f"{name}[{i}]", rules, depth + 1) for i, item in enumerate(value))
        return f"{tuple_name}[{', '.join(items)}]"
    if isinstance(value, (set, frozenset)):
        return f"set{{{', '.join(sorted(_text(item, name, rules, depth + 1) for item in value))}}}"
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if key not in rules.not_keys:
                key_text = _text(key, name, rules, depth + 1)
                pairs.append(f"{key_text}: {_text(item, f'{name}[{key_text}]', rules, depth + 1)}")
        return f"{{{', '.join(sorted(pairs))}}}"
    if _is_open(value, rules):
        inside = (
            f"{field_name}={_text(item, f'{name}.{field_name}', rules, depth + 1)}"
            for field_name, item in _fields_of(value, rules)
        )
        return f"{_class_name(type(value))}({', '.join(inside)})"
    raise LayoutError(
        f"{name} is a {_class_name(type(value))}, which is no plain value: kvhold cannot "
        "tell two of them apart, so it does not cache. "
        f'Use a plain value, or add "{name}" to the setting `share`: then you promise that '
        "it is the same in all engines that share KV"
    )


def _is_open(value: Any, rules: NamingRules) -> bool:
    if value is None or isinstance(value, (*_PLAIN, type, Enum, Mapping)):
        return False
    kind = type(value)
    return (
        dataclasses.is_dataclass(kind)
        or isinstance(value, msgspec.Struct)
        or (rules.opens(kind) and not callable(value))
    )


def _fields_of(value: Any, rules: NamingRules) -> list[tuple[str, Any]]:
    kind = type(value)
    declared = (
        {f.name for f in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(kind)
        else set(getattr(kind, "__struct_fields__", ()))
    )
    names = declared | vars(value).keys() if hasattr(value, "__dict__") else declared
    chosen = []
    for name in sorted(names):
        computed = isinstance(getattr(kind, name, None), cached_property)
        if (
            computed
            or name.startswith("__")
            or rules.harmless(kind, name)
            or name in rules.not_keys
            or not hasattr(value, name)
        ):
            continue
        chosen.append((name, getattr(value, name)))
    return chosen


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_depth(name: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise LayoutError(
            f"{name} is nested {_MAX_DEPTH} deep or contains itself, so kvhold cannot name it"
        )


class Description(msgspec.Struct, frozen=True, array_like=True):
    title: str
    facts: dict[str, str] = {}


def pack(title: str, facts: Mapping[str, str]) -> bytes:
    """If the description is too large, its longest texts become digests."""
    shown = {
        name: _hide(text) if _may_be_secret(name, text) else text for name, text in facts.items()
    }
    for longest in (MAX_TEXT, 256, 64):
        cut = {name: text if len(text) <= longest else _hide(text) for name, text in shown.items()}
        packed = zlib.compress(msgspec.msgpack.encode(Description(title[:256], cut)))
        if len(packed) <= MAX_DESCRIPTION_BYTES:
            return packed
    return zlib.compress(
        msgspec.msgpack.encode(
            Description(title[:256], {"facts": f"{len(facts)}, too many to list"})
        )
    )


def unpack(packed: bytes) -> Description:
    """Raises ProtocolError."""
    if not packed:
        return Description("")
    try:
        stream = zlib.decompressobj()
        raw = stream.decompress(packed, MAX_UNPACKED_BYTES)
        if stream.unconsumed_tail or not stream.eof:
            raise ProtocolError("a namespace's description is too large or incomplete")
        return msgspec.msgpack.decode(raw, type=Description)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a namespace's description cannot be read: {error}") from None


def _may_be_secret(name: str, text: str) -> bool:
    return ("'" in text or '"' in text) and bool(
        _SECRET.search(name) or _SECRET_INSIDE.search(text)
    )


def _hide(text: str) -> str:
    return f"(hidden) {blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"
