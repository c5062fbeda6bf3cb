"""Whatever `kv_transfer_params` say of a hand-over, no token changes, and no host is called."""

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.integrations.vllm import handovers
from kvhold.integrations.vllm.handovers import HANDED
from tests.node.nodes import eventually
from tests.vllm.engines import MakeEngine, engine, node
from tests.vllm.handing import (
    DECODER,
    DISAGG,
    HASTY,
    NIXL,
    PREFILLER,
    TOKENS,
    ask,
    assert_waits,
    decode,
    engines,
    has_planned_a_pass,
    kept,
    patient,
    prefill,
    since,
    waits,
)
from tests.vllm.scheduling import Engine, NodeProcess, answer_to, make_prompt

__all__ = ["engine", "engines", "node"]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("notes")]


class Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings about hand-overs. vLLM's loggers do not propagate."""
    handler, logger = Notes(), logging.getLogger(handovers.__name__)
    logger.addHandler(handler)
    yield handler.said
    logger.removeHandler(handler)


def too_deep() -> Any:
    deep: Any = "end"
    for _ in range(500):
        deep = [deep]
    return deep


WRONG = {
    "a flag that is text": {"do_remote_prefill": "yes"},
    "a flag that is a number": {"do_remote_decode": 1},
    "a flag that is a list": {"do_remote_prefill": [True]},
    "a prefiller that is a list": {"remote_prefiller": ["203.0.113.1", 1]},
    "a decoder that is text": {"remote_decoder": "203.0.113.1"},
    "both parts": NIXL | {"do_remote_prefill": True},
    "both parts of p2p": DECODER | PREFILLER,
    "both parts of LMCache": DISAGG | {"do_remote_prefill": True},
    "a specification that is a list": {"disagg_spec": ["203.0.113.1", 1]},
    "handed: a number": {"do_remote_prefill": True, HANDED: 7},
    "handed: a list": {"do_remote_prefill": True, HANDED: list(range(10_000))},
    "handed: empty": {"do_remote_prefill": True, HANDED: {}},
    "handed: deep": {"do_remote_prefill": True, HANDED: {"namespace": too_deep()}},
    "handed: long": {"do_remote_prefill": True, HANDED: {"namespace": "0" * 99, "num_tokens": 1}},
    "handed: negative": {
        "do_remote_prefill": True,
        HANDED: {"namespace": "00" * 16, "num_tokens": -1},
    },
    "handed: huge": {
        "do_remote_prefill": True,
        HANDED: {"namespace": "00" * 16, "num_tokens": 1 << 63},
    },
    "handed: not a number": {
        "do_remote_prefill": True,
        HANDED: {"namespace": "00" * 16, "num_tokens": float("nan")},
    },
    "another engine's name": {
        "do_remote_prefill": True,
        HANDED: {"namespace": "00" * 16, "num_tokens": 64, "last": "00" * 20},
    },
}
UNKNOWN = {
    "hosts and blocks": {
        "do_remote_prefill": True,
        "remote_host": "203.0.113.1",
        "remote_port": 9,
        "remote_engine_id": "another",
        "remote_block_ids": [list(range(100_000))],
        "tp_size": 1 << 40,
    },
    "no hosts": {"remote_prefiller": {}},
    "strange hosts": {"remote_prefiller": {"remote_host": ["a"], "remote_port": -1}},
    "another protocol": {"remote_kv_source": {"remote_host": "203.0.113.1", "remote_port": 9}},
    "LMCache's receiver": DISAGG,
    "a strange receiver": {"disagg_spec": {"receiver_host": 7, "receiver_init_port": "a"}},
    "nothing": {},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_parameters_warn_once_and_change_nothing(
    engine: MakeEngine, said: list[str], what: str
) -> None:
    one, prompt = engine(settings=patient(HASTY)), make_prompt(what, TOKENS)
    for number in range(3):
        ask(one, f"d{number}", prompt, WRONG[what], max_tokens=4)
        one.run()
        assert one.outputs[f"d{number}"] == answer_to(prompt, 4)
    [warning] = said
    assert "kv_transfer_params." in warning
    assert len(warning) < 300


@pytest.mark.parametrize("what", UNKNOWN)
def test_hosts_and_blocks_of_the_parameters_are_not_used(
    engine: MakeEngine,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    one, connect = engine(settings=patient(HASTY)), socket.socket.connect
    called: list[Any] = []

    def noted(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            called.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noted)
    assert decode(one, make_prompt(what, TOKENS), UNKNOWN[what]) == TOKENS
    assert called == []
    assert said == []


def test_stale_parameters_of_another_prompt_are_not_waited_for(
    engines: tuple[Engine, Engine], node: NodeProcess
) -> None:
    one, two = engines
    before = waits(node)
    stale = prefill(one, make_prompt("stale", TOKENS), "p")
    one.hands.holds_stores = True
    prompt = make_prompt("fresh", TOKENS)
    prefill(one, prompt, "q")
    assert decode(two, prompt, stale) == TOKENS
    assert since(node, before) == {}
    one.hands.finish_stores()


def test_stale_parameters_find_what_is_there_all_the_same(
    engines: tuple[Engine, Engine],
) -> None:
    one, two = engines
    stale = prefill(one, make_prompt("old", TOKENS), "p")
    prompt = make_prompt("new", TOKENS)
    prefill(one, prompt, "q")
    assert decode(two, prompt, stale) == 1


def test_parameters_may_come_twice(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    prompt = make_prompt("twice", TOKENS)
    handed = prefill(one, prompt)
    assert decode(two, prompt, handed, "d") == 1
    two.scheduler.reset_prefix_cache()
    assert decode(two, prompt, handed, "e") == 1


def test_parameters_outlive_what_they_name(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    prompt = make_prompt("cleared", TOKENS)
    handed = prefill(one, prompt)
    one.hands.client.clear()
    assert decode(two, prompt, handed) == TOKENS


def test_the_specification_of_lmcache_names_a_prefill(
    engines: tuple[Engine, Engine], node: NodeProcess
) -> None:
    """The KV is awaited while it is computed, and kept until it is read."""
    one, two = engines
    before, prompt = waits(node), make_prompt("lmcache", TOKENS)
    ask(one, "p", prompt, DISAGG)
    eventually(lambda: has_planned_a_pass(one))
    ask(two, "d", prompt, PREFILLER, max_tokens=4)
    assert_waits(two, "d")
    one.run()
    assert kept(node) == TOKENS // 64 + 1
    two.run()
    assert two.tokens_computed["d"] == 4
    assert since(node, before) == {"stored": 1}
    assert "p" not in one.handed
