"""The collector of cycles does not stop a node's loop, and does not have to."""

import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvhold.cache.chores import Running
from kvhold.cache.local import open_cache
from kvhold.cache.state import new_state
from kvhold.core.config import Config
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.net import messages as m
from kvhold.node.names import Names
from kvhold.node.session import Session
from kvhold.testing.cache import PATIENT_S, PLAIN, a_prompt, read, registered, store

LAYOUT = Layout((Group(layers=1, planes=1, heads=1, head_dim=8, dtype="int8"),), tokens_per_chunk=2)
SPACE = Namespace("model", LAYOUT)


def test_requests_make_no_cycles_so_nothing_piles_up_while_the_collector_rests() -> None:
    state = new_state(Config(event_buffer=100), SimpleNamespace(nbytes=1 << 20))  # type: ignore[arg-type]
    host: Any = SimpleNamespace(names=Names(), router_publisher=None)
    session = Session(state, m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "test", 1), host)

    def ask(request: m.Request) -> Any:
        answer = session.answer(request)
        if isinstance(answer, Running):
            while not answer.step():
                pass
            return answer.result
        return answer

    def serve(number: int) -> None:
        for first, size in ((0, 3), (5_000_000, 400)):  # in one turn, and in several
            prompt = SPACE.prompt(np.arange(2 * size, dtype=np.int32) + 1000 * number + first)
            ask(m.Register(LAYOUT, SPACE.digest))
            granted = ask(m.Reserve(LAYOUT.fingerprint, prompt.chunks(), 0))
            ask(m.Commit(granted.reservation, [0, 1], bytes(8 * 2)))
            ask(m.Abandon(granted.reservation))
            found = ask(m.Lookup(prompt.query()))
            leased = ask(m.Claim(found.ticket, 0, 0))
            ask(m.Release(found.ticket))
            ask(m.Release(leased.lease))
            ask(m.Prefetch(prompt.query()))
            retained = ask(m.Retain(prompt.query(), 60.0))
            ask(m.Release(retained.answer.number))
            ask(m.Demote(prompt.query()))
            assert isinstance(ask(m.Claim(found.ticket, 0, 0)), m.NotFound)
        if number % 10 == 0:
            ask(m.Clear(SPACE.digest))

    for number in range(20):
        serve(number)
    gc.collect()
    gc.disable()
    try:
        for number in range(20, 120):
            serve(number)
        assert gc.collect() < 100, "less than one object for each round of twenty requests"
    finally:
        gc.enable()


def test_reads_from_a_tier_make_no_cycles() -> None:
    with open_cache(ram_bytes="4MiB", tiers=["memory://?max_bytes=64MiB"]) as cache:
        space = registered(cache, Namespace("model", PLAIN))
        prompts = [a_prompt(space, 16 * 16, seed) for seed in range(60)]
        for prompt in prompts:
            store(cache, prompt)
            assert cache.flush(deadline_s=PATIENT_S)
        gc.collect()
        gc.disable()
        try:
            for prompt in prompts[:40]:
                assert read(cache, prompt) == 16 * 16
            assert gc.collect() < 40 * 16, "less than one object for each chunk"
        finally:
            gc.enable()


def test_a_node_collects_young_objects_when_it_is_told_to() -> None:
    """In a process of its own: the collector of this one is pytest's."""
    code = """
import gc
from weakref import ref
from kvhold.node.pauses import avoid_pauses, collect_all, collect_young

class Thing:
    pass

def cycle():
    thing = Thing()
    thing.me = thing
    return ref(thing)

avoid_pauses()
first = cycle()
collect_young(may_look=True)
assert first() is None
second = cycle()
collect_young(may_look=False)
collect_young(may_look=True)
assert second() is not None, "it is old: nobody looks at it"
collect_all()
assert second() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
