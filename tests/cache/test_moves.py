"""Chunks go from tier to tier and to memory; none leaves its place before the other has it."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.cache import LocalCache
from kvhold.codecs import read_header
from kvhold.core.api import CopyProgress
from kvhold.core.errors import ConfigError, TierError
from kvhold.core.keys import Namespace
from kvhold.testing.cache import a_prompt, read, store
from tests.cache.below import (
    CHUNK_BYTES,
    HYBRID_SPACE,
    PATIENT_S,
    SPACE,
    a_cache_over,
    cache_over,
    eventually,
    forget,
    on_disk,
)
from tests.cache.clearing import DOWN, PLUGINS, chunks, settle
from tests.cache.places import place
from tests.tiers.memory import Place, a_place

__all__ = ["place"]

PROMPT = a_prompt(SPACE, 72)
OTHER = a_prompt(HYBRID_SPACE, 64)
KEYS = ["=env:MOVES_KEY"]


@pytest.fixture
def far() -> Iterator[Place]:
    with a_place() as place:
        yield place


def urls(near: Place, far: Place, *, shared: bool = False, **options: object) -> tuple[str, str]:
    far_url = far.shared_url if shared else far.url
    near_url = near.url(name="near", batch_bytes=2 * CHUNK_BYTES, **options)
    return near_url, far_url(name="far", **options)


def fill(cache: LocalCache, far: Place) -> None:
    """The near tier has both prompts, and memory none."""
    for prompt in (PROMPT, OTHER):
        store(cache, prompt)
    settle(cache)
    far.values.clear()
    forget(cache)


def moved(cache: LocalCache, target: str, **options: Any) -> CopyProgress:
    query = None if "namespace" in options else PROMPT.query()
    with cache.copy(target, query, source=options.pop("source", "near"), **options) as copying:
        return copying.wait()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["prompt", "namespace"])
def test_chunks_go_from_tier_to_tier(
    place: Place, far: Place, shared: bool, drop: bool, whole: bool
) -> None:
    with a_cache_over(*urls(place, far, shared=shared), plugins=PLUGINS) as cache:
        fill(cache, far)
        total = chunks(place)
        done = moved(cache, "far", drop=drop, **({"namespace": SPACE.digest} if whole else {}))
        assert (done.done, done.stopped, done.failed) == (True, "", 0)
        assert (done.copied, done.dropped) == (5, 5 if drop else 0)
        assert done.bytes > 4 * CHUNK_BYTES
        assert (chunks(far), chunks(place)) == (5, total - done.dropped)
        assert cache.status()["chunks"] == 0, "they pass memory by"
        place.faults = dict(DOWN) if not drop else {}
        with cache.lookup(PROMPT.query()) as hit:
            assert (hit.num_tokens, hit.sources) == (72, {"far": 72})
        place.faults = {}
        eventually(lambda: cache.status()["tiers"][0]["available"])
        forget(cache)
        assert read(cache, OTHER) == 64


@pytest.mark.parametrize("space", [SPACE, HYBRID_SPACE])
@pytest.mark.parametrize("drop", [False, True])
def test_a_prompt_goes_to_memory(place: Place, far: Place, space: Namespace, drop: bool) -> None:
    prompt = a_prompt(space, 72)
    with a_cache_over(*urls(place, far)) as cache:
        store(cache, prompt)
        settle(cache)
        num_chunks = chunks(place)
        forget(cache)
        far.hold("probe")
        with cache.copy("ram", prompt.query(), source="near", drop=drop) as copying:
            done = copying.wait()
        assert not far.calls["get"], "only the named tier is read"
        far.let_go("probe")
        assert (done.done, done.stopped) == (True, "")
        # those before a window are not needed in memory, and stay
        assert 5 <= done.copied <= num_chunks == chunks(place) + done.dropped
        assert done.dropped == (done.copied if drop else 0)
        assert cache.status()["pinned_chunks"] == 0
        with cache.lookup(prompt.query(), wait_s=0) as hit:
            assert (hit.num_tokens, hit.sources) == (72, {"ram": 72})
        assert read(cache, prompt) == 72


def test_memory_without_room_leaves_the_rest_in_the_tier(place: Place, far: Place) -> None:
    long = a_prompt(SPACE, 16 * 128)
    with cache_over(*urls(place, far), write_behind_bytes="16MiB") as cache:
        store(cache, long)
        settle(cache)
    assert chunks(place) == 128
    with a_cache_over(*urls(place, far), ram_bytes="2MiB") as cache:
        with cache.copy("ram", long.query(), source="near", drop=True) as copying:
            done = copying.wait()
        assert 0 < done.copied == done.dropped < 128
        assert f"{16 * done.copied} tokens are in memory: no memory was free" in done.stopped
        assert chunks(place) == 128 - done.dropped
        assert read(cache, long.until(16 * done.copied)) == 16 * done.copied


def test_a_namespace_goes_from_memory_to_a_tier(place: Place, far: Place) -> None:
    with a_cache_over(*urls(place, far)) as cache:
        for prompt in (PROMPT, OTHER):
            store(cache, prompt)
        settle(cache)
        total = cache.status()["chunks"]
        far.values.clear()
        done = moved(cache, "far", source="ram", namespace=SPACE.digest, drop=True)
        assert (done.copied, done.dropped, done.stopped) == (5, 5, "")
        assert (chunks(far), cache.status()["chunks"]) == (5, total - 5)


@given(st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_no_chunk_is_ever_lost(seed: int) -> None:
    """Calls of either tier fail, and the target has damaged values."""
    dice = random.Random(seed)
    with a_place() as near, a_place() as far:
        tiers = urls(near, far, breaker_failures=1000)
        with cache_over(*tiers) as cache:
            fill(cache, far)
            keys = set(near.values)
            for key in dice.sample(sorted(keys), dice.choice((0, 2))):
                far.values[key] = dice.choice((near.values[key], b"damaged"))
            for of in (near, far):
                unlucky = dice.sample(("probe", "get", "put", "delete", "scan"), dice.randrange(3))
                of.faults = dict.fromkeys(unlucky, TierError("memory", "call", "bad luck"))
                of.unreadable = {key for key in keys if dice.random() < 0.1}
            done = moved(cache, "far", namespace=SPACE.digest, drop=True)
            assert done.done and done.dropped <= done.copied
            assert len(near.values) + done.dropped == len(keys)
        for of in (near, far):
            of.faults, of.unreadable = {}, set()
        far.values = {key: value for key, value in far.values.items() if value != b"damaged"}
        assert near.values.keys() | far.values.keys() == keys
        with cache_over(*tiers) as cache:
            assert (read(cache, PROMPT), read(cache, OTHER)) == (72, 64)


def test_two_names_of_one_place_lose_nothing(place: Place, far: Place) -> None:
    with a_cache_over(place.url(name="near"), place.url(name="far")) as cache:
        fill(cache, far)
        total = chunks(place)
        done = moved(cache, "far", drop=True)
        assert done.dropped == 0 and "near and far may be one place" in done.stopped
        assert chunks(place) == total
        assert read(cache, PROMPT) == 72


@pytest.mark.parametrize("of_prompt", [False, True])
@pytest.mark.parametrize("held", ["get", "put"])
def test_a_clear_during_it_leaves_nothing(
    place: Place, far: Place, of_prompt: bool, held: str
) -> None:
    with a_cache_over(*urls(place, far)) as cache:
        fill(cache, far)
        at = place if held == "get" else far
        at.hold(held)
        with cache.copy("far", PROMPT.query(), source="near") as copying:
            at.wait_for(held)
            if of_prompt:
                cache.clear_prompt(PROMPT.query(), deadline_s=0)
            else:
                cache.clear(SPACE.digest, deadline_s=0)
            at.let_go(held)
            done = copying.wait()
        settle(cache)
        assert done.copied == 0
        assert not any(key.startswith(SPACE.digest) for key in (*place.values, *far.values))
        assert (read(cache, PROMPT), read(cache, OTHER)) == (0, 64)


def test_what_was_read_before_a_clear_is_not_put(
    place: Place, far: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, goes_on = threading.Event(), threading.Event()

    def read_header_late(frame: memoryview, **options: Any) -> Any:
        is_read.set()
        assert goes_on.wait(PATIENT_S)
        return read_header(frame, **options)

    with a_cache_over(*urls(place, far)) as cache:
        fill(cache, far)
        monkeypatch.setattr("kvhold.cache.transfer.tier_mover.read_header", read_header_late)
        kept = {key for key in place.values if not key.startswith(SPACE.digest)}
        with cache.copy("far", PROMPT.query(), source="near") as copying:
            assert is_read.wait(PATIENT_S)
            cache.clear(SPACE.digest, deadline_s=PATIENT_S)
            assert place.values.keys() == kept
            goes_on.set()
            done = copying.wait()
        settle(cache)
        assert (done.copied, chunks(far)) == (0, 0)


def test_closed_early_it_goes_no_further(place: Place, far: Place) -> None:
    with a_cache_over(*urls(place, far)) as cache:
        fill(cache, far)
        total = chunks(place)
        far.hold("put")
        with cache.copy("far", PROMPT.query(), source="near", drop=True):
            far.wait_for("put")
        far.let_go("put")
        assert moved(cache, "far").copied == 5, "the next one runs"
        assert chunks(place) == total, "the first removed none"


def test_it_ends_with_a_tier_that_fails(place: Place, far: Place) -> None:
    with a_cache_over(*urls(place, far, breaker_pause_s=0.01)) as cache:
        fill(cache, far)
        total = chunks(place)
        far.faults = dict(DOWN)
        done = moved(cache, "far", drop=True)
        assert "tier far failed" in done.stopped and done.dropped == 0
        assert chunks(place) == total
        far.faults = {}
        place.faults = dict(DOWN)
        done = moved(cache, "ram", drop=True)
        assert (done.copied, done.dropped) == (0, 0)
        place.faults = {}


def test_codecs_and_keys_are_those_of_the_target(
    place: Place, far: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOVES_KEY", "A" * 43 + "=")
    near_url = place.url(name="near", codec="lossless", encrypt="true")
    with a_cache_over(near_url, far.url(name="far"), encryption={"keys": KEYS}) as cache:
        fill(cache, far)
        assert moved(cache, "far", drop=True).dropped == 5
        assert {read_header(value).codec for value in far.values.values()} == {"raw"}
        assert moved(cache, "near", source="far", drop=True).dropped == 5
        assert not any(b"lossless" in value[:64] for value in place.values.values()), "sealed"
        assert read(cache, PROMPT) == 72


def test_only_two_known_and_different_places_are_named(
    place: Place, far: Place, tmp_path: Path
) -> None:
    read_only = far.url(name="far", read_only=True)
    with cache_over(place.url(name="near"), read_only, on_disk(tmp_path)) as cache:
        for source, target, options, told in (
            ("near", "near", {}, "in near already"),
            ("nera", "far", {}, "did you mean 'near'"),
            ("near", "far", {}, "nothing is written to it"),
            ("far", "disk", {"drop": True}, "nothing is written to it"),
            ("near", "host:b", {}, "move the chunks to ram first"),
            ("near", "ram", {"namespace": SPACE.digest}, "name a prompt"),
            ("ram", "host:b", {"namespace": SPACE.digest}, "follows no peers"),
            ("near", "disk", {"namespace": bytes(16)}, "is not known here"),
        ):
            query = None if "namespace" in options else PROMPT.query()
            with pytest.raises(ConfigError, match=told):
                cache.copy(target, query, source=source, **options)
        cache.clear(deadline_s=PATIENT_S)
