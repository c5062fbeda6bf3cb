"""Whatever a tier does, its guard answers in time, raises nothing and counts everything."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvhold.core.errors import (
    TierCannotList,
    TierDenied,
    TierError,
    TierFull,
    TierIncomplete,
    TierUnavailable,
)
from kvhold.core.metrics import Metrics
from kvhold.testing.tier import make_key
from kvhold.tiers.base import Parts
from kvhold.tiers.calls import TierCall
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from tests.tiers.memory import MemoryTier, Place, a_place

SOON_S = 0.02  # a deadline that is to pass
KEYS = [bytes([i]) * 60 for i in range(3)]
FAULTS = {
    "TierError": TierError("memory", "x", "broken"),
    "TierUnavailable": TierUnavailable("memory", "x", "gone"),
    "TierFull": TierFull("memory", "x", "full"),
    "TierDenied": TierDenied("memory", "x", "no"),
    "ValueError": ValueError("nonsense"),
    "AssertionError": AssertionError(),
    "OSError": OSError(5, "I/O"),
    "CancelledError": asyncio.CancelledError(),
}


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as place:
        yield place


class Bench:
    def __init__(self, place: Place, **settings: Any) -> None:
        self.metrics = Metrics()
        self.guard = Guard(
            MemoryTier(place), GuardConfig(**settings), name="t", metrics=self.metrics
        )

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.value(name, tier="t", **labels)

    def is_available(self) -> bool:
        return self.guard.available

    async def get(self) -> tuple[list[int | None], list[bytes], "asyncio.Task[object] | None"]:
        buffers = [bytearray(4) for _ in KEYS]
        outcome = await self.guard.get(KEYS, parts(buffers))
        return outcome.items, [bytes(buffer) for buffer in buffers], outcome.pending

    async def call(self, operation: str) -> object:
        """The call, and nothing but its answer."""
        if operation == "get":
            return (await self.get())[0]
        if operation == "put":
            return (await self.guard.put(items())).items
        if operation == "replace":
            return (await self.guard.replace(items())).items
        if operation == "clear":
            return await self.guard.clear(b"")
        return await getattr(self.guard, operation)(KEYS)


@pytest.fixture
async def bench(place: Place) -> AsyncIterator[Bench]:
    bench = Bench(place)
    yield bench
    await bench.guard.close()


def items() -> list[tuple[bytes, Parts]]:
    return [(key, [memoryview(b"ab"), memoryview(b"cd")]) for key in KEYS]


def parts(buffers: list[bytearray]) -> list[Parts]:
    return [[memoryview(buffer)] for buffer in buffers]


NOTHING_CAME = {
    "probe": [None] * 3,
    "get": [None] * 3,
    "put": [False] * 3,
    "replace": [None] * 3,
    "delete": [False] * 3,
    "clear": 0,
}


def test_a_batch_is_as_large_as_the_tier_likes_or_as_is_asked(place: Place) -> None:
    assert Bench(place).guard.batch_bytes == MemoryTier(place).traits.batch_bytes == 8 << 20
    assert Bench(place, batch_bytes=1).guard.batch_bytes == 1


async def test_a_tier_that_does_only_a_part_of_a_call_is_still_used(
    bench: Bench, place: Place
) -> None:
    place.faults = {"delete": TierIncomplete("t", "delete", "a tier below did not answer")}
    silent = set[str]()
    for _ in range(10):
        assert await bench.guard.delete(KEYS, silent) == [False] * 3
    assert silent == {"t"}
    assert place.calls["delete"] == 10, "not tried twice"
    assert bench.guard.available
    assert bench.count("kvhold_tier_errors", operation="delete", reason="incomplete") == 10


async def test_a_tier_that_cannot_list_is_still_used(bench: Bench, place: Place) -> None:
    place.faults = {"scan": TierCannotList("t", "scan", "no list")}
    silent = set[str]()
    for _ in range(10):
        assert len(await bench.guard.scan(b"", silent)) == 0
    assert silent == {"t"}
    assert place.calls["scan"] == 10, "not tried twice"
    assert bench.guard.available
    assert bench.count("kvhold_tier_errors", operation="scan", reason="unlisted") == 10


async def test_what_goes_well_is_passed_on_and_counted(bench: Bench) -> None:
    assert await bench.call("probe") == [None] * 3
    assert await bench.call("put") == [True] * 3
    assert await bench.call("probe") == [4] * 3
    assert await bench.get() == ([4] * 3, [b"abcd"] * 3, None)
    assert await bench.call("replace") == [True] * 3
    assert (await bench.guard.scan(b"\1")).parts == [[KEYS[1]]]
    assert await bench.guard.delete(KEYS[:1]) == [True]
    assert await bench.call("delete") == [False, True, True]
    assert await bench.call("replace") == [False] * 3
    counted = {
        (operation, result): bench.count("kvhold_tier_items", operation=operation, result=result)
        for operation, result in (
            ("probe", "miss"),
            ("probe", "hit"),
            ("put", "stored"),
            ("get", "hit"),
            ("replace", "replaced"),
            ("replace", "absent"),
            ("delete", "removed"),
        )
    }
    assert set(counted.values()) == {3}
    assert {
        bench.count("kvhold_tier_bytes", operation=operation)
        for operation in ("put", "get", "replace")
    } == {12}
    assert bench.guard.status()["last_fault"] == ""


async def test_durations_are_counted_by_operation_and_size(bench: Bench) -> None:
    for operation in ("probe", "put", "get", "replace", "delete"):
        await bench.call(operation)
    large = memoryview(bytes(65_536))
    await bench.guard.put([(KEYS[0], [large, large[:1]])])
    await bench.guard.put([(KEYS[0], [large[:1], large[1:]])])
    assert {
        sample.labels[1:]: sample.counts[-1]
        for sample in bench.metrics.samples()
        if sample.metric.name == "kvhold_tier_seconds"
    } == {
        ("probe", ""): 1,
        ("put", "64KiB"): 2,
        ("put", "1MiB"): 1,
        ("get", "64KiB"): 1,
        ("replace", "64KiB"): 1,
        ("delete", ""): 1,
    }


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (0, ""),
        (1, "64KiB"),
        (1 << 20, "1MiB"),
        ((1 << 20) + 1, "16MiB"),
        (16 << 20, "16MiB"),
        ((16 << 20) + 1, "larger"),
        (1 << 50, "larger"),
    ],
)
async def test_there_are_five_sizes_of_calls(nbytes: int, size: str) -> None:
    metrics = Metrics()
    TierCall[None]("get", 1, 1.0, nbytes).observe(metrics, "t", 0.5)
    (sample,) = metrics.samples()
    assert sample.labels == ("t", "get", size)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("operation", NOTHING_CAME)
async def test_nothing_that_a_tier_raises_comes_through(
    bench: Bench,
    place: Place,
    operation: str,
    fault: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await bench.call("put")
    place.faults["scan" if operation == "clear" else operation] = fault
    with caplog.at_level(logging.CRITICAL):
        assert await bench.call(operation) == NOTHING_CAME[operation]
    reason = fault.reason if isinstance(fault, TierError) else "internal"
    assert (
        bench.count(
            "kvhold_tier_errors",
            operation="scan" if operation == "clear" else operation,
            reason=reason,
        )
        >= 1
    )
    if operation == "put":
        dropped = fault.reason if isinstance(fault, TierError) else "error"
        assert bench.count("kvhold_tier_dropped_chunks", reason=dropped) == 3
    place.faults.clear()
    if isinstance(fault, TierDenied):
        assert not bench.guard.available, "nothing is to be hoped for"
    elif operation == "clear":
        assert await bench.call("probe") == [None] * 3, "what could not be cleared is not used"
    else:
        assert await bench.call("probe") == [4] * 3


@pytest.mark.parametrize("operation", ["probe", "get", "put", "delete"])
async def test_an_answer_with_an_item_too_few_is_none(
    bench: Bench, place: Place, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.call("put")
    place.shorten = True
    assert await bench.call(operation) == NOTHING_CAME[operation]
    assert bench.count("kvhold_tier_errors", operation=operation, reason="internal") >= 1


async def test_a_passing_fault_of_one_item_does_not_hide_its_value(
    bench: Bench, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(
        self: object, keys: object, into: object, *, starts: object = None
    ) -> list[object]:
        return [
            3,
            TierUnavailable("memory", "get", "the connection was reset"),
            TierError("memory", "get", "a bad sector"),
        ]

    place.values = dict.fromkeys(KEYS, b"abc")
    monkeypatch.setattr(MemoryTier, "get", get)
    assert await bench.call("get") == [3, None, None]
    assert await bench.guard.probe(KEYS) == [3, 3, None]


async def test_a_key_that_a_probe_could_not_ask_for_is_no_plain_miss(
    bench: Bench, place: Place
) -> None:
    place.values = {KEYS[0]: b"abc", KEYS[1]: b"abc"}
    place.unanswered = {KEYS[1]}
    silent = set[str]()
    assert await bench.guard.probe(KEYS, silent) == [3, None, None]
    assert silent == {"t"}
    assert bench.count("kvhold_tier_errors", operation="probe", reason="unavailable") == 1
    assert bench.guard.available


async def test_a_fault_of_one_item_is_that_item_s_alone(
    bench: Bench, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(
        self: object, keys: object, into: object, *, starts: object = None
    ) -> list[object]:
        return [3, TierError("memory", "get", "a bad sector"), None]

    async def put(self: object, items: object, *, ttl_s: object = None) -> list[object]:
        return [None, TierFull("memory", "put", "no room"), None]

    monkeypatch.setattr(MemoryTier, "get", get)
    monkeypatch.setattr(MemoryTier, "put", put)
    assert await bench.call("get") == [3, None, None]
    assert await bench.call("put") == [True, False, True]
    assert bench.count("kvhold_tier_errors", operation="get", reason="error") == 1
    assert bench.count("kvhold_tier_errors", operation="put", reason="full") == 1
    assert bench.count("kvhold_tier_dropped_chunks", reason="full") == 1
    assert bench.count("kvhold_tier_bytes", operation="put") == 8


class TestClears:
    async def test_what_is_stored_meanwhile_does_not_keep_it_from_ending(
        self, bench: Bench, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await bench.call("put")
        delete = MemoryTier.delete

        async def delete_while_others_store(self: MemoryTier, keys: list[bytes]) -> list[bool]:
            removed = await delete(self, keys)
            place.values |= {KEYS[0]: b"later", b"another": b"later"}
            return removed

        monkeypatch.setattr(MemoryTier, "delete", delete_while_others_store)
        assert await bench.guard.clear(b"") == 3
        assert bench.guard.status()["pending_clears"] == 0
        assert await bench.guard.probe([*KEYS[:2], b"another"]) == [5, None, 5]

    async def test_an_earlier_clear_does_not_end_one_that_waits_for_a_write(
        self, bench: Bench, place: Place
    ) -> None:
        await bench.call("put")
        first = await bench.guard.begin_clear(b"")
        second = await bench.guard.begin_clear(b"")  # a write is under way that it has to wait for
        assert await bench.guard.end_clear(first) == 3
        place.values[KEYS[0]] = b"of the write that ended now"
        assert await bench.guard.probe(KEYS) == [None] * 3
        assert bench.guard.status()["pending_clears"] == 1
        assert await bench.guard.end_clear(second) == 1
        assert bench.guard.status()["pending_clears"] == 0
        assert place.values == {}

    async def test_a_later_clear_pays_for_an_earlier_one(self, bench: Bench) -> None:
        await bench.call("put")
        first, second = await bench.guard.begin_clear(b""), await bench.guard.begin_clear(b"")
        assert await bench.guard.end_clear(second) == 3
        assert await bench.guard.end_clear(first) == 0
        assert bench.guard.status()["pending_clears"] == 0

    async def test_what_others_have_removed_meanwhile_is_not_owed(
        self, bench: Bench, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await bench.call("put")
        delete = MemoryTier.delete

        async def delete_after_others(self: MemoryTier, keys: list[bytes]) -> list[bool]:
            place.values.pop(KEYS[1])
            return await delete(self, keys)

        monkeypatch.setattr(MemoryTier, "delete", delete_after_others)
        assert await bench.guard.clear(b"") == 2
        assert bench.guard.status()["pending_clears"] == 0

    async def test_what_the_tier_did_not_remove_is_owed_and_not_found(
        self, bench: Bench, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def delete_nothing(self: MemoryTier, keys: list[bytes]) -> list[bool]:
            return [False] * len(keys)

        await bench.call("put")
        monkeypatch.setattr(MemoryTier, "delete", delete_nothing)
        assert await bench.guard.clear(b"") == 0
        assert bench.guard.status()["pending_clears"] == 1
        assert await bench.call("probe") == [None] * 3
        assert len(place.values) == 3


class TestRetries:
    @pytest.mark.parametrize(
        ("operation", "calls"), [("probe", 2), ("get", 2), ("delete", 2), ("put", 1)]
    )
    async def test_only_what_may_safely_be_done_twice_is(
        self, bench: Bench, place: Place, operation: str, calls: int
    ) -> None:
        place.faults[operation] = FAULTS["TierUnavailable"]
        await bench.call(operation)
        assert place.calls[operation] == calls

    @pytest.mark.parametrize("fault", ["TierFull", "TierDenied"])
    async def test_what_cannot_go_better_is_not_tried_again(
        self, bench: Bench, place: Place, fault: str
    ) -> None:
        place.faults["get"] = FAULTS[fault]
        await bench.call("get")
        assert place.calls["get"] == 1

    async def test_a_second_try_that_works_is_as_good_as_a_first(
        self, bench: Bench, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await bench.call("put")
        enter = Place.enter

        async def enter_and_mend(self: Place, operation: str, keys: list[bytes]) -> None:
            try:
                await enter(self, operation, keys)
            finally:
                self.faults.clear()

        monkeypatch.setattr(Place, "enter", enter_and_mend)
        place.faults["get"] = FAULTS["TierError"]
        assert await bench.get() == ([4] * 3, [b"abcd"] * 3, None)
        assert bench.count("kvhold_tier_errors", operation="get", reason="error") == 1


class TestDeadlines:
    @pytest.mark.parametrize("operation", ["probe", "get", "put", "delete"])
    async def test_a_tier_that_hangs_is_a_miss_and_is_not_called_again_for_it(
        self, place: Place, operation: str
    ) -> None:
        bench = Bench(place, probe_timeout_s=SOON_S, get_timeout_s=SOON_S, put_timeout_s=SOON_S)
        place.hold(operation)
        assert await bench.call(operation) == NOTHING_CAME[operation]
        assert place.calls[operation] == 1
        assert bench.count("kvhold_tier_errors", operation=operation, reason="timeout") == 1
        await bench.guard.close()

    async def test_a_call_that_ends_on_its_cancellation_is_not_pending_afterwards(
        self, place: Place
    ) -> None:
        bench = Bench(place, get_timeout_s=SOON_S)
        place.hold("get")
        _, _, pending = await bench.get()
        assert pending is not None
        await asyncio.wait((pending,))
        assert place.inside["get"] == 0
        assert bench.guard.status()["stuck_calls"] == 0
        await bench.guard.close()

    @pytest.mark.parametrize("operation", ["get", "put"])
    async def test_what_does_not_let_go_is_pending_until_it_does(
        self, place: Place, operation: str
    ) -> None:
        bench = Bench(place, get_timeout_s=SOON_S, put_timeout_s=SOON_S)
        await bench.call("put")
        place.deaf = True
        place.hold(operation)
        buffers = [bytearray(4) for _ in KEYS]
        outcome = await (
            bench.guard.get(KEYS, parts(buffers))
            if operation == "get"
            else bench.guard.put(items())
        )
        assert outcome.items == NOTHING_CAME[operation]
        assert outcome.pending is not None
        for _ in range(10):
            await asyncio.sleep(0)
        assert not outcome.pending.done()
        assert bench.guard.status()["stuck_calls"] == 1
        assert bench.count("kvhold_tier_stuck_calls") == 1
        place.let_go(operation)
        await asyncio.wait((outcome.pending,))
        await asyncio.sleep(0)
        assert bench.guard.status()["stuck_calls"] == 0
        assert bench.count("kvhold_tier_stuck_calls") == 0
        await bench.guard.close()

    async def test_a_scan_that_hangs_ends_the_clear(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.guard.SCAN_TIMEOUT_S", SOON_S)
        bench = Bench(place)
        place.hold("scan")
        assert await bench.guard.clear(b"") == 0
        assert bench.count("kvhold_tier_errors", operation="scan", reason="timeout") == 1
        await bench.guard.close()

    async def test_a_scan_that_is_left_early_is_closed_at_once(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_keys, closed = 0, False

        async def scan() -> AsyncIterator[bytes]:
            nonlocal num_keys, closed
            try:
                for num_keys in range(1_000_000):
                    yield make_key(num_keys)
            finally:
                closed = True

        keys = scan()  # kept, so that it is not the garbage collector which closes it
        monkeypatch.setattr(bench.guard.tier, "scan", lambda prefix: keys)
        monkeypatch.setattr("kvhold.tiers.guard.KeyList.append", lambda keys, key: True)
        scanning = asyncio.ensure_future(bench.guard.scan_all(b""))
        while num_keys < 10:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        scanning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scanning
        assert closed

    async def test_whoever_is_cancelled_waits_until_the_tier_has_let_go(
        self, bench: Bench, place: Place
    ) -> None:
        place.hold("get")
        call = asyncio.ensure_future(bench.get())
        while not place.inside["get"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert place.inside["get"] == 0

    async def test_a_close_that_hangs_is_left_behind(self, place: Place) -> None:
        bench = Bench(place, get_timeout_s=SOON_S)
        place.hold("close")
        await bench.guard.close()
        assert bench.count("kvhold_tier_errors", operation="close", reason="timeout") == 1

    async def test_a_close_that_fails_leaves_nothing_that_retries(self, place: Place) -> None:
        bench = Bench(place, get_timeout_s=SOON_S, breaker_failures=1, breaker_pause_s=1000)
        place.hold("close")
        await bench.guard.close()
        assert not any("_mend" in repr(task) for task in asyncio.all_tasks())


class TestBreaker:
    async def test_a_tier_that_keeps_failing_is_touched_no_more(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = Bench(place, breaker_failures=2, breaker_pause_s=1000)
        place.faults["get"] = FAULTS["TierUnavailable"]
        with caplog.at_level(logging.WARNING):
            await bench.call("get")
        assert not bench.guard.available
        assert bench.count("kvhold_tier_available") == 0
        assert len(caplog.records) == 1
        before = place.calls.copy()
        for operation, answer in NOTHING_CAME.items():
            assert await bench.call(operation) == answer
        assert place.calls == before
        assert bench.count("kvhold_tier_errors", operation="put", reason="breaker open") == 1
        assert bench.count("kvhold_tier_dropped_chunks", reason="unavailable") == 3
        assert "gone" in bench.guard.status()["last_fault"]
        await bench.guard.close()

    async def test_successes_in_between_keep_it_in_use(self, place: Place) -> None:
        bench = Bench(place, breaker_failures=2, breaker_pause_s=1000)
        for _ in range(6):
            place.faults["put"] = FAULTS["TierError"]
            await bench.call("put")
            await bench.call("probe")
        assert bench.guard.available
        await bench.guard.close()

    async def test_it_is_tried_in_the_background_and_used_again(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = Bench(place, breaker_failures=1, breaker_pause_s=0.001)
        place.faults |= {"get": FAULTS["TierUnavailable"], "check": FAULTS["TierUnavailable"]}
        await bench.call("get")
        while place.calls["check"] < 3:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
        assert not bench.guard.available
        place.faults.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="kvhold.tiers.guard"):
            while not bench.is_available():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)
        assert bench.count("kvhold_tier_available") == 1
        assert [record.message for record in caplog.records] == ["tier t is back"]
        await bench.call("put")
        assert await bench.call("probe") == [4] * 3
        await bench.guard.close()

    @pytest.mark.parametrize("fault", ["ValueError", "CancelledError"])
    async def test_a_check_that_breaks_the_contract_does_not_end_the_tries(
        self, place: Place, fault: str
    ) -> None:
        bench = Bench(place, breaker_failures=1, breaker_pause_s=0.001)
        place.faults |= {"get": FAULTS["TierUnavailable"], "check": FAULTS[fault]}
        await bench.call("get")
        while place.calls["check"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        place.faults.clear()
        while not bench.guard.available:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await bench.guard.close()

    async def test_while_calls_are_stuck_in_it_no_more_are_made(self, place: Place) -> None:
        bench = Bench(place, breaker_failures=1, breaker_pause_s=0.001, get_timeout_s=SOON_S)
        place.deaf = True
        place.hold("get")
        _, _, pending = await bench.get()
        assert pending is not None
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert place.calls["check"] == 0
        place.let_go("get")
        while not bench.guard.available:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await bench.guard.close()

    async def test_an_opening_after_a_closing_leaves_one_background_task(
        self, place: Place
    ) -> None:
        bench = Bench(place, breaker_failures=1, breaker_pause_s=1000)
        for _ in range(3):
            place.faults["put"] = FAULTS["TierError"]
            await bench.call("put")
            await asyncio.sleep(0)
            assert not bench.guard.available
            bench.guard._succeeded()  # as a call does that was under way
        await bench.call("put")
        await asyncio.sleep(0)
        mending = [task for task in asyncio.all_tasks() if "_mend" in repr(task)]
        assert len(mending) == 1
        await bench.guard.close()
        assert all(task.done() for task in mending)
