"""When requests are sent: as soon as there is room, or when they are due; and what of a run is
kept.
"""

import asyncio
from collections.abc import Iterator

import pytest

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.runner import LoadRun
from kvhold_lab.bench.load.work import Phase, Reply, Request, Result, Session, Turn, single


def ask(number: int, at_s: float | None = None) -> Request:
    return Request("g", (Turn("user", "text"),), 1, at_s=at_s, labels={"number": number})


class Server:
    """Answers when told to."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[Reply]] = {}
        self.most = 0

    async def send(self, request: Request) -> Reply:
        number = int(request.labels["number"])
        self.waiting[number] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.waiting))
        try:
            return await self.waiting[number]
        finally:
            del self.waiting[number]

    def answer(self, number: int) -> None:
        self.waiting[number].set_result(
            Reply(latency_s=1.0, text=f"answer {number}", content=f"answer {number}")
        )


async def settled() -> None:
    """Long enough for whatever can go on to go on: nothing here waits for a time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_closed_loop_sends_the_next_when_one_has_ended() -> None:
    server, kept = Server(), list[Result]()
    run = LoadRun(server.send, kept.append)
    running = asyncio.create_task(
        run.phase(Phase("p", (single(ask(number)) for number in range(5)), max_in_flight=2))
    )
    await settled()
    assert set(server.waiting) == {0, 1}
    assert run.in_flight == 2
    server.answer(1)
    await settled()
    assert set(server.waiting) == {0, 2}
    for number in (2, 3, 4, 0):
        server.answer(number)
        await settled()
    await running
    assert server.most == 2
    assert [result.labels["number"] for result in kept] == [1, 2, 3, 4, 0]
    assert all(result.late_s is None and result.reply.text == "" for result in kept)


async def test_an_open_loop_waits_for_nobody() -> None:
    together, kept = asyncio.Barrier(300), list[Result]()

    async def wait_for_all(request: Request) -> Reply:
        await together.wait()
        return Reply(latency_s=1.0)

    await LoadRun(wait_for_all, kept.append).phase(
        Phase("p", (single(ask(number, 0.0)) for number in range(300)))
    )
    assert len(kept) == 300
    assert all(result.late_s is not None and result.late_s >= 0 for result in kept)


async def test_requests_are_sent_in_the_order_of_their_arrival() -> None:
    kept = list[Result]()

    async def at_once(request: Request) -> Reply:
        return Reply(latency_s=0.0)

    await LoadRun(at_once, kept.append).phase(
        Phase("p", (single(ask(number, number * 0.01)) for number in range(10)))
    )
    assert [result.labels["number"] for result in kept] == list(range(10))


async def test_a_session_goes_on_from_its_answers() -> None:
    seen = list[str]()

    def conversation() -> Session:
        for number in range(3):
            reply = yield ask(number)
            seen.append(str(reply.content))

    async def at_once(request: Request) -> Reply:
        return Reply(latency_s=0.0, content=f"answer {request.labels['number']}")

    await LoadRun(at_once, lambda _: None).phase(Phase("p", [conversation()]))
    assert seen == ["answer 0", "answer 1", "answer 2"]


async def test_only_as_many_sessions_are_made_as_there_is_room_for() -> None:
    made = list[int]()

    def sessions() -> Iterator[Session]:
        for number in range(1_000_000):
            made.append(number)
            yield single(ask(number))

    server = Server()
    running = asyncio.create_task(
        LoadRun(server.send, lambda _: None).phase(Phase("p", sessions(), max_in_flight=3))
    )
    await settled()
    assert len(made) <= 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_answers_are_scored_where_that_is_known() -> None:
    kept = list[Result]()

    async def send(request: Request) -> Reply:
        return Reply(
            latency_s=1.0, text="right", error="timeout" if request.labels["number"] else None
        )

    requests = [
        Request("g", (), 1, labels={"number": number}, score=lambda text: float(text == "right"))
        for number in (0, 1)
    ]
    await LoadRun(send, kept.append).phase(Phase("p", map(single, requests)))
    assert [result.score for result in kept] == [1.0, None]


async def test_a_workloads_own_error_ends_the_phase_as_itself() -> None:
    def bad() -> Session:
        yield ask(0)
        raise ConfigError("the trace has an end")

    async def at_once(request: Request) -> Reply:
        return Reply(latency_s=0.0)

    with pytest.raises(ConfigError, match="the trace has an end"):
        await LoadRun(at_once, lambda _: None).phase(Phase("p", [bad()]))
