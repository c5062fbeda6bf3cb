"""Hints are read strictly, and nothing that a request says can fail it."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.core.hints import (
    MOST_ACTIONS,
    Hint,
    HintAction,
    HintAnswer,
    HintOutcome,
    RequestHints,
    read_hints,
)

PIN = {"action": "pin", "ttl_s": 60}


class Action(msgspec.Struct, frozen=True):
    """As vLLM decodes it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[Action]


def action(kind: str = "kv.pin", **payload: Any) -> dict[str, Any]:
    return {
        "action_id": "a",
        "action_type": kind,
        "action_version": "1.0",
        "payload": payload,
    }


def envelope(*actions: Any, **changes: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)} | changes


def own(*hints: Any, **more: Any) -> dict[str, Any]:
    return {"kvhold": {"hints": list(hints), **more}}


def the_refused(read: RequestHints) -> HintAnswer:
    assert read.hints == ()
    (answer,) = read.refused
    assert answer.outcome is HintOutcome.REJECTED
    return answer


def test_three_messages_mean_the_same() -> None:
    typed = Envelope("0.1", "m", [Action("a", "kv.pin", "1.0", {"ttl_s": 60})])
    read = read_hints(
        typed,
        {"kv_hint": envelope(action(ttl_s=60)), **own({"id": "a", **PIN})},
    )
    assert read.refused == ()
    assert read.hints == tuple(
        Hint(field, "a", HintAction.PIN, 60.0)
        for field in (
            "kv_hints.actions[0]",
            "kv_transfer_params.kv_hint.actions[0]",
            "kv_transfer_params.kvhold.hints[0]",
        )
    )


@pytest.mark.parametrize("params", [None, {}, [], {"kvhold": None}, {"kvhold": {"store": True}}])
def test_a_request_without_hints_has_none(params: Any) -> None:
    assert read_hints(None, params) == RequestHints()
    assert not read_hints(None, params)


def test_a_pin_may_be_of_the_first_tokens() -> None:
    (hint,) = read_hints(None, own({"num_tokens": 10**400, **PIN})).hints
    assert hint.num_tokens == 10**400


@pytest.mark.parametrize("spelling", ["kv.Demote", "DEMOTE", "demote"])
def test_an_action_may_be_spelt_as_the_field_does(spelling: str) -> None:
    (hint,) = read_hints(envelope(action(spelling)), None).hints
    assert hint.action is HintAction.DEMOTE


def test_a_fetch_of_a_router_names_no_place() -> None:
    fetch = action("kv.fetch", source_control_endpoint="tcp://h:1", block_hashes=[1], mode="copy")
    answer = the_refused(read_hints(None, {"kv_hint": envelope(fetch)}))
    assert answer.action == "fetch"
    assert "payload.source_control_endpoint: no place is taken from a request" in answer.reason


@pytest.mark.parametrize("kind", [HintAction.FETCH, HintAction.SHARE])
def test_a_fetch_or_share_may_be_of_the_first_tokens(kind: HintAction) -> None:
    (hint,) = read_hints(envelope(action(f"kv.{kind}", num_tokens=64)), None).hints
    assert (hint.action, hint.num_tokens) == (kind, 64)
    (hint,) = read_hints(None, own({"action": str(kind)})).hints
    assert (hint.action, hint.num_tokens, hint.tier) == (kind, None, "")


def test_a_fetch_may_name_one_of_the_nodes_tiers() -> None:
    for read in (
        read_hints(envelope(action("kv.fetch", tier="disk")), None),
        read_hints(None, own({"action": "fetch", "tier": "disk"})),
    ):
        (hint,) = read.hints
        assert (hint.action, hint.tier) == (HintAction.FETCH, "disk")


@pytest.mark.parametrize(
    ("hint", "complaint"),
    [
        ({"action": "pin"}, r"hints\[0\].ttl_s: it is missing"),
        ({"action": "pin", "ttl_s": 0}, r"ttl_s: 0 must be a number above 0"),
        ({"action": "pin", "ttl_s": True}, "ttl_s: True must"),
        ({"action": "pin", "ttl_s": "60"}, "ttl_s: '60' must"),
        ({"action": "pin", "ttl_s": float("nan")}, "ttl_s: nan must"),
        ({"action": "pin", "ttl_s": 10**400}, "ttl_s: a large integer must"),
        ({"num_tokens": 0, **PIN}, r"num_tokens: 0 must be a whole number above 0"),
        ({"num_tokens": True, **PIN}, "num_tokens: True must"),
        ({"num_tokens": 1.0, **PIN}, "num_tokens: 1.0 must"),
        ({"action": "demote", "num_tokens": 1}, "there is no field 'num_tokens'; known are target"),
        ({"action": "fetch", "num_tokens": 0}, "num_tokens: 0 must be a whole number"),
        ({"action": "fetch", "source": "tcp://h:1"}, "source: no place is taken from a request"),
        ({"action": "share", "target": "disk"}, "target: no place is taken from a request"),
        ({"action": "fetch", "tier": 7}, "tier: 7 must be text"),
        ({"action": "share", "tier": "disk"}, "there is no field 'tier'; known are num_tokens"),
        ({"action": "share", "ttl_s": 1}, "there is no field 'ttl_s'; known are num_tokens"),
        ({"action": "pin", "ttl_s": 1, "until": "superseded"}, "until: only retain"),
        ({"action": "retain", "ttl_s": 1, "until": "noon"}, "until: 'noon' must be 'ttl'"),
        ({"action": "retain", "until": "superseded"}, "needs a session_id"),
        ({"action": "demote", "ttl_s": 1}, "there is no field 'ttl_s'; known are target"),
        ({"action": "demote", "target": "all"}, "target: 'all' must be 'prompt' or 'session'"),
        ({"action": "demote", "target": "session"}, "target = 'session' needs a session_id"),
        ({"action": "pin", "ttl_s": 1, "target": "session"}, "there is no field 'target'"),
        ({"action": "explode"}, "action: 'explode' must be one of pin, retain, prefetch"),
        ({"action": ["pin"]}, "action: a list must be one of"),
        ({}, "action: None must be one of"),
        ({"id": "x" * 129, **PIN}, r"id: 'x+\.\.\.' must be text of at most 128"),
        ({"id": "a\n", **PIN}, r"id: 'a\\n' must be text"),
        ({"actoin": "pin"}, "there is no field 'actoin'; known are id, action, ttl_s"),
        ("pin", "'pin' must be an object"),
        (None, "None must be an object"),
    ],
)
def test_a_bad_hint_is_refused_with_its_field_and_the_reason(hint: Any, complaint: str) -> None:
    answer = the_refused(read_hints(None, own(hint)))
    assert answer.field == "kv_transfer_params.kvhold.hints[0]"
    assert re.search(complaint, answer.reason), answer.reason


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (7, "kv_hints: 7 must be an object"),
        (envelope(protocol_version="1.0"), "kv_hints.protocol_version: '1.0' must be '0.1'"),
        (envelope(protocol_version=None), "kv_hints.protocol_version: None must be '0.1'"),
        (envelope(message_id=7), "kv_hints.message_id: 7 must be text"),
        (envelope(actions={}), "kv_hints.actions: a dict must be a list"),
        (envelope(*[action()] * 17), "kv_hints.actions: there are 17 actions, of 16 at most"),
        (envelope(extra=1), "kv_hints: there is no field 'extra'"),
        (envelope(5), r"kv_hints.actions[0]: 5 must be an object"),
        (envelope(action() | {"payload": 5}), "kv_hints.actions[0].payload: 5 must be an object"),
        (
            envelope(action() | {"action_version": "2.0"}),
            "kv_hints.actions[0].action_version: '2.0' must be '1.0'",
        ),
    ],
)
def test_a_bad_message_is_refused(message: Any, complaint: str) -> None:
    assert complaint in the_refused(read_hints(message, None)).reason


def test_a_bad_hint_does_not_harm_the_others() -> None:
    read = read_hints(None, own(PIN, {"action": "pin"}, {"action": "demote"}))
    assert [hint.action for hint in read.hints] == [HintAction.PIN, HintAction.DEMOTE]
    assert the_refused(RequestHints((), read.refused)).id == ""


@pytest.mark.parametrize("kind", ["prefetch", "demote"])
def test_a_session_may_be_the_target(kind: str) -> None:
    hints = [{"action": kind}, {"action": kind, "target": "session"}]
    read = read_hints(None, own(*hints, session_id="s"))
    assert [hint.of_session for hint in read.hints] == [False, True]


def test_a_retain_until_superseded_needs_no_time() -> None:
    hint = {"action": "retain", "until": "superseded"}
    (read,) = read_hints(None, own(hint, session_id="s")).hints
    assert (read.ttl_s, read.until_superseded) == (None, True)
    (read,) = read_hints(None, own(hint), "of vLLM").hints
    assert read.until_superseded


class TestSession:
    def test_kvholds_own_field_goes_before_vllms(self) -> None:
        assert read_hints(None, own(session_id="own"), "vllm").session_id == "own"
        assert read_hints(None, None, "vllm").session_id == "vllm"

    def test_its_end_is_told(self) -> None:
        read = read_hints(None, own(session_id="s", end_session=True))
        assert read.ends_session
        assert not read.refused

    @pytest.mark.parametrize(
        ("fields", "complaint"),
        [
            ({"session_id": 5}, "session_id: 5 must be text"),
            ({"session_id": "s" * 129}, "must be text of at most 128 characters"),
            ({"session_id": "s", "end_session": 1}, "end_session: 1 must be true or false"),
            ({"end_session": True}, "end_session: it needs a session_id"),
        ],
    )
    def test_a_bad_one_is_refused(self, fields: dict[str, Any], complaint: str) -> None:
        read = read_hints(None, own(**fields))
        assert not read.ends_session
        assert complaint in the_refused(read).reason


_words = st.sampled_from(
    [
        *("pin", "kv.retain", "0.1", "1.0", "ttl", "superseded", "s", "x" * 200),
        *("action", "hints", "actions", "payload", "ttl_s"),
    ]
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _words,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("protocol_version", "message_id", "actions", "action_id", "action_type"),
                    *("action_version", "payload", "id", "action", "ttl_s", "until", "hints"),
                    *("session_id", "end_session", "other", "target"),
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
_hints = st.fixed_dictionaries(
    {"action": st.sampled_from(["pin", "retain", "demote", "fetch"]) | _json},
    optional={
        "ttl_s": _json,
        "until": _words,
        "id": _words,
        "num_tokens": _json,
        "other": _json,
    },
)


@settings(max_examples=100, deadline=None)
@given(
    message=_json | st.builds(lambda actions: envelope(*actions), st.lists(_json, max_size=20)),
    hints=_json | st.lists(_hints, max_size=20),
    session_id=_json,
)
def test_whatever_a_request_says_is_read_within_bounds(
    message: Any, hints: Any, session_id: Any
) -> None:
    read = read_hints(message, {"kv_hint": message, "kvhold": {"hints": hints}}, session_id)
    assert len(read.hints) + len(read.refused) <= 3 * MOST_ACTIONS + 1
    assert len(read.session_id) <= 128
    for answer in read.refused:
        assert answer.reason
        assert len(json.dumps(answer.as_json())) < 1500
    if isinstance(hints, list) and len(hints) <= MOST_ACTIONS:
        fields = [one.field for one in read.hints] + [one.field for one in read.refused]
        for number in range(len(hints)):
            assert fields.count(f"kv_transfer_params.kvhold.hints[{number}]") == 1
    for hint in read.hints:
        kept = hint.action in (HintAction.PIN, HintAction.RETAIN)
        assert (hint.ttl_s is not None or hint.until_superseded) == kept
