"""Hints of a request about KV, from three kinds of messages (docs/hints.md).

Nothing raises: a bad hint is refused with its field and the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from kvhold.core.store_options import MAX_TTL_S

PROTOCOL_VERSION, ACTION_VERSION = "0.1", "1.0"
MOST_ACTIONS = 16  # per message
MOST_NAME = 128  # characters
OWN_FIELDS = ("hints", "session_id", "end_session", "spans")
"""Fields of `kv_transfer_params.kvhold` that are no rules."""

_SUPERSEDED, _TTL = "superseded", "ttl"
_PROMPT, _SESSION = "prompt", "session"
_MOST_QUOTED = 60
_PLACES = ("source_control_endpoint", "block_hashes", "mode", "source", "target")


class HintAction(StrEnum):
    PIN = "pin"
    RETAIN = "retain"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    SHARE = "share"
    FETCH = "fetch"


_KINDS = {str(one): one for one in HintAction}


class HintOutcome(StrEnum):
    """DEFERRED: begun, or carried out after the request. MISSING: there is no such KV."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    MISSING = "missing"


@dataclass(frozen=True)
class Hint:
    """An action on the KV of the request's own prompt, or of its session.

    field:            its place in the request
    id:               the sender's name; may be empty
    ttl_s:            None: not given
    until_superseded: it ends with the session's next turn
    num_tokens:       of the prompt, from its start; None: all
    tier:             to fetch only from; empty: all
    """

    field: str
    id: str
    action: HintAction
    ttl_s: float | None = None
    until_superseded: bool = False
    of_session: bool = False
    num_tokens: int | None = None
    tier: str = ""

    @property
    def needs_session(self) -> bool:
        return self.until_superseded or self.of_session

    def answer(self, outcome: HintOutcome, reason: str = "", num_tokens: int = 0) -> "HintAnswer":
        return HintAnswer(self.field, self.id, str(self.action), outcome, reason, num_tokens)


@dataclass(frozen=True)
class HintAnswer:
    """num_tokens: of the prompt, from its start, with the found `sources` by place"""

    field: str
    id: str
    action: str
    outcome: HintOutcome
    reason: str = ""
    num_tokens: int = 0
    sources: Mapping[str, int] | None = None

    def of(self, sources: Mapping[str, int]) -> "HintAnswer":
        return replace(self, sources=dict(sources))

    def as_json(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"field": self.field, "outcome": str(self.outcome)}
        for name in ("id", "action", "reason", "num_tokens", "sources"):
            if value := getattr(self, name):
                answer[name] = value
        return answer


@dataclass(frozen=True)
class RequestHints:
    hints: tuple[Hint, ...] = ()
    refused: tuple[HintAnswer, ...] = ()
    session_id: str = ""
    ends_session: bool = False

    def __bool__(self) -> bool:
        return bool(self.hints or self.refused or self.session_id)


class _BadHint(Exception):
    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def read_hints(envelope: Any, params: Any, session_id: Any = None) -> RequestHints:
    """Read vLLM's `kv_hints`, and `kv_hint` and `kvhold` of the `kv_transfer_params`."""
    params = params if isinstance(params, Mapping) else {}
    own = params.get("kvhold")
    own = own if isinstance(own, Mapping) else {}
    read: list[Hint | HintAnswer] = []
    if envelope is not None:
        read += _envelope("kv_hints", envelope)
    if params.get("kv_hint") is not None:
        read += _envelope("kv_transfer_params.kv_hint", params["kv_hint"])
    if own.get("hints") is not None:
        read += _own_hints("kv_transfer_params.kvhold.hints", own["hints"])
    session, ends = "", False
    try:
        session = _session(own, session_id)
        ends = _flag("kv_transfer_params.kvhold.end_session", own.get("end_session"))
        if ends and not session:
            raise _BadHint("kv_transfer_params.kvhold.end_session", "it needs a session_id")
    except _BadHint as error:
        read.append(_refused(error))
        ends = False
    checked = [_check_session(one, session) if isinstance(one, Hint) else one for one in read]
    return RequestHints(
        tuple(one for one in checked if isinstance(one, Hint)),
        tuple(one for one in checked if isinstance(one, HintAnswer)),
        session,
        ends,
    )


def session_of(params: Any, session_id: Any = None) -> str:
    """Empty: none, or a bad one."""
    own = params.get("kvhold") if isinstance(params, Mapping) else None
    with suppress(_BadHint):
        return _session(own if isinstance(own, Mapping) else {}, session_id)
    return ""


def _session(own: Mapping[str, Any], session_id: Any) -> str:
    session = _name("session_id", session_id)
    return _name("kv_transfer_params.kvhold.session_id", own.get("session_id")) or session


def _check_session(hint: Hint, session_id: str) -> Hint | HintAnswer:
    if hint.needs_session and not session_id:
        field = "until = 'superseded'" if hint.until_superseded else "target = 'session'"
        return hint.answer(HintOutcome.REJECTED, f"{field} needs a session_id")
    return hint


def _envelope(field: str, value: Any) -> Iterator[Hint | HintAnswer]:
    try:
        message = _fields(field, value, ("protocol_version", "message_id", "actions"))
        version = message.get("protocol_version")
        if version != PROTOCOL_VERSION:
            raise _BadHint(
                f"{field}.protocol_version", f"{_quoted(version)} must be {PROTOCOL_VERSION!r}"
            )
        _name(f"{field}.message_id", message.get("message_id"))
        actions = _list(f"{field}.actions", message.get("actions"))
    except _BadHint as error:
        yield _refused(error)
        return
    for number, one in enumerate(actions):
        yield _action(f"{field}.actions[{number}]", one)


def _action(field: str, value: Any) -> Hint | HintAnswer:
    hint_id = action = ""
    try:
        one = _fields(field, value, ("action_id", "action_type", "action_version", "payload"))
        hint_id = _name(f"{field}.action_id", one.get("action_id"))
        kind = _kind(f"{field}.action_type", one.get("action_type"))
        action = str(kind)
        version = one.get("action_version")
        if version != ACTION_VERSION:
            raise _BadHint(
                f"{field}.action_version", f"{_quoted(version)} must be {ACTION_VERSION!r}"
            )
        return _hint(field, hint_id, kind, f"{field}.payload", one.get("payload", {}))
    except _BadHint as error:
        return replace(_refused(error), field=field, id=hint_id, action=action)


def _own_hints(field: str, value: Any) -> Iterator[Hint | HintAnswer]:
    try:
        hints = _list(field, value)
    except _BadHint as error:
        yield _refused(error)
        return
    for number, one in enumerate(hints):
        yield _own_hint(f"{field}[{number}]", one)


def _own_hint(field: str, value: Any) -> Hint | HintAnswer:
    hint_id = action = ""
    try:
        known = ("id", "action", "ttl_s", "until", "target", "num_tokens", "tier", *_PLACES)
        one = dict(_fields(field, value, known))
        hint_id = _name(f"{field}.id", one.pop("id", None))
        kind = _kind(f"{field}.action", one.pop("action", None))
        action = str(kind)
        return _hint(field, hint_id, kind, field, one)
    except _BadHint as error:
        return replace(_refused(error), field=field, id=hint_id, action=action)


def _hint(field: str, hint_id: str, kind: HintAction, at: str, payload: Any) -> Hint:
    if kind in (HintAction.SHARE, HintAction.FETCH):
        _check_no_place(at, payload)
        known = ("num_tokens", "tier") if kind is HintAction.FETCH else ("num_tokens",)
        values = _fields(at, payload, known)
        num_tokens = _count(f"{at}.num_tokens", values.get("num_tokens"))
        tier = _name(f"{at}.tier", values.get("tier"))
        return Hint(field, hint_id, kind, num_tokens=num_tokens, tier=tier)
    if kind in (HintAction.PREFETCH, HintAction.DEMOTE):
        target = _fields(at, payload, ("target",)).get("target", _PROMPT)
        if target not in (_PROMPT, _SESSION):
            raise _BadHint(f"{at}.target", f"{_quoted(target)} must be {_PROMPT!r} or {_SESSION!r}")
        return Hint(field, hint_id, kind, of_session=target == _SESSION)
    values = _fields(at, payload, ("ttl_s", "until", "num_tokens"))
    ttl_s, until = values.get("ttl_s"), values.get("until", _TTL)
    if until not in (_TTL, _SUPERSEDED):
        raise _BadHint(f"{at}.until", f"{_quoted(until)} must be {_TTL!r} or {_SUPERSEDED!r}")
    if until == _SUPERSEDED and kind is not HintAction.RETAIN:
        raise _BadHint(f"{at}.until", f"only retain may end when {_SUPERSEDED}")
    if ttl_s is None and until == _TTL:
        raise _BadHint(f"{at}.ttl_s", "it is missing: say for how many seconds")
    if ttl_s is not None and not _is_time(ttl_s):
        raise _BadHint(f"{at}.ttl_s", f"{_quoted(ttl_s)} must be a number above 0 to {MAX_TTL_S:g}")
    return Hint(
        field,
        hint_id,
        kind,
        None if ttl_s is None else float(ttl_s),
        until == _SUPERSEDED,
        num_tokens=_count(f"{at}.num_tokens", values.get("num_tokens")),
    )


def _check_no_place(at: str, payload: Any) -> None:
    """A request must not make the node contact an address."""
    for name in _PLACES:
        if isinstance(payload, Mapping) and name in payload:
            raise _BadHint(
                f"{at}.{name}",
                "no place is taken from a request: leave it out, and the tiers and peers of the "
                "node's settings are used, for the request's own prompt",
            )


def _is_time(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= MAX_TTL_S  # not NaN
    )


def _count(field: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _BadHint(field, f"{_quoted(value)} must be a whole number above 0")
    return value


def _fields(field: str, value: Any, known: Sequence[str]) -> Mapping[str, Any]:
    """value: an object, also one that is decoded already"""
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if not isinstance(value, Mapping):
        raise _BadHint(field, f"{_quoted(value)} must be an object")
    for name in value:
        if name not in known:
            raise _BadHint(
                field, f"there is no field {_quoted(name)}; known are {', '.join(known)}"
            )
    return value


def _list(field: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _BadHint(field, f"{_quoted(value)} must be a list")
    if len(value) > MOST_ACTIONS:
        raise _BadHint(field, f"there are {len(value)} actions, of {MOST_ACTIONS} at most")
    return value


def _kind(field: str, value: Any) -> HintAction:
    if isinstance(value, str) and len(value) <= MOST_NAME:
        name = value.lower().removeprefix("kv.")
        if name in _KINDS:
            return _KINDS[name]
    raise _BadHint(field, f"{_quoted(value)} must be one of {', '.join(HintAction)}")


def _name(field: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MOST_NAME or not value.isprintable():
        raise _BadHint(field, f"{_quoted(value)} must be text of at most {MOST_NAME} characters")
    return value


def _flag(field: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _BadHint(field, f"{_quoted(value)} must be true or false")
    return bool(value)


def _refused(error: _BadHint) -> HintAnswer:
    return HintAnswer(error.field, "", "", HintOutcome.REJECTED, f"{error.field}: {error}")


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _MOST_QUOTED else f"{value[:_MOST_QUOTED]}...")
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else "a large integer"
    return f"a {type(value).__name__}"
