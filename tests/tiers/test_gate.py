"""Turns at a tier: the most urgent first, never more than the width, and none lost."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.tiers.gate import Gate, Urgency


class Line:
    """Those who wait for a turn at one gate, and the order in which they got it."""

    def __init__(self, width: int) -> None:
        self.gate = Gate(width)
        self.entered: list[str] = []
        self.inside: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def join(self, name: str, urgency: Urgency) -> None:
        self.inside[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self._stay(name, urgency))
        await turns()

    async def leave(self, name: str) -> None:
        self.inside[name].set()
        await turns()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await turns()

    async def _stay(self, name: str, urgency: Urgency) -> None:
        async with self.gate.turn(urgency):
            self.entered.append(name)
            await self.inside[name].wait()

    async def end(self) -> None:
        for event in self.inside.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_most_urgent_waiting_call_is_next_and_among_equals_the_first() -> None:
    line = Line(1)
    for name, urgency in (("now", 1), ("w1", 2), ("d1", 1), ("w2", 2), ("r1", 0), ("r2", 0)):
        await line.join(name, Urgency(urgency))
    for name in ("now", "r1", "r2", "d1", "w1", "w2"):
        await line.leave(name)
    assert line.entered == ["now", "r1", "r2", "d1", "w1", "w2"]
    await line.end()


async def test_rewrites_come_after_all_other_calls_and_never_take_the_last_turn() -> None:
    line = Line(2)
    for name, urgency in (
        ("a1", Urgency.REWRITE),
        ("a2", Urgency.REWRITE),
        ("w1", Urgency.WRITE),
        ("r1", Urgency.READ),
    ):
        await line.join(name, urgency)
    assert line.entered == ["a1", "r1"]
    await line.leave("a1")
    assert line.entered == ["a1", "r1", "w1"]
    await line.leave("r1")
    assert line.entered == ["a1", "r1", "w1"]
    await line.leave("w1")
    assert line.entered[-1] == "a2"
    await line.end()


async def test_writes_never_take_the_last_turn_and_a_read_takes_it_at_once() -> None:
    line = Line(3)
    for name in ("w1", "w2", "w3"):
        await line.join(name, Urgency.WRITE)
    assert line.entered == ["w1", "w2"]
    await line.join("r1", Urgency.READ)
    assert line.entered == ["w1", "w2", "r1"]
    await line.leave("r1")
    assert "w3" not in line.entered
    await line.leave("w1")
    assert line.entered[-1] == "w3"
    await line.end()


async def test_with_one_turn_in_all_writes_have_it_too() -> None:
    line = Line(1)
    await line.join("w", Urgency.WRITE)
    assert line.entered == ["w"]
    await line.end()


async def test_who_is_cancelled_while_waiting_takes_no_turn() -> None:
    line = Line(1)
    for name in ("now", "gone", "next"):
        await line.join(name, Urgency.READ)
    await line.cancel("gone")
    await line.leave("now")
    assert line.entered == ["now", "next"]
    await line.end()


async def test_who_is_cancelled_in_the_moment_of_its_turn_gives_it_on() -> None:
    line = Line(1)
    for name in ("now", "gone", "next"):
        await line.join(name, Urgency.READ)
    line.inside["now"].set()
    await asyncio.sleep(0)  # "now" leaves; "gone" has its turn, and has not run yet
    line.tasks["gone"].cancel()
    await turns()
    assert line.entered == ["now", "next"]
    await line.end()


async def test_who_fails_inside_gives_its_turn_back() -> None:
    gate = Gate(1)
    with pytest.raises(RuntimeError):
        async with gate.turn(Urgency.READ):
            raise RuntimeError
    async with asyncio.timeout(60), gate.turn(Urgency.WRITE):
        pass


@settings(max_examples=60)
@given(
    width=st.integers(1, 4),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "cancel"]), st.integers(0, 2), st.integers(0, 30)
        ),
        max_size=60,
    ),
)
def test_no_turn_is_lost_or_given_twice(width: int, steps: list[tuple[str, int, int]]) -> None:
    async def live() -> None:
        line = Line(width)
        urgencies: dict[str, Urgency] = {}
        waiting: list[str] = []
        inside: list[str] = []
        for number, (step, urgency, which) in enumerate(steps):
            if step == "join":
                urgencies[f"{number}"] = Urgency(urgency)
                waiting.append(f"{number}")
                await line.join(f"{number}", Urgency(urgency))
            elif step == "leave" and inside:
                await line.leave(inside.pop(which % len(inside)))
            elif step == "cancel" and (waiting or inside):
                name = (waiting + inside)[which % len(waiting + inside)]
                await line.cancel(name)
                for names in (waiting, inside):
                    if name in names:
                        names.remove(name)
            inside += [name for name in line.entered if name in waiting]
            waiting = [name for name in waiting if name not in inside]
            writes = sum(urgencies[name] is Urgency.WRITE for name in inside)
            assert len(inside) <= width
            assert writes <= max(1, width - 1)
            if waiting:
                soonest = min(urgencies[name] for name in waiting)
                assert len(inside) == width or (
                    soonest is Urgency.WRITE and writes == max(1, width - 1)
                ), "a free turn, and one who waits"
        await line.end()
        assert {name for name in urgencies if name in line.entered} >= set(waiting) | set(inside), (
            "everybody came to their turn"
        )

    asyncio.run(live())
