"""Equal requests to several servers, one after the other."""

import asyncio

from kvhold_lab.bench.load.client import Endpoint
from kvhold_lab.bench.load.in_turns import InTurns
from kvhold_lab.bench.load.measure import LoadMeasurement, measure_in_turns
from kvhold_lab.bench.load.prompts import TokenPrompts
from kvhold_lab.bench.load.work import Reply, Request, Result, Turn
from kvhold_lab.bench.load.workloads import MultiRoundQA
from tests.lab.bench.load.server import serving


def ask(number: int) -> Request:
    return Request("g", (Turn("user", "text"),), 1, labels={"number": number})


class Servers:
    """Note who was asked what; a request takes some turns of the loop."""

    def __init__(self, names: str) -> None:
        self.asked: list[tuple[str, int]] = []
        self.kept: list[tuple[str, Result]] = []
        self.in_flight = self.most = 0
        sends = {name: lambda request, name=name: self._send(name, request) for name in names}
        self.turns = InTurns(sends, lambda name, result: self.kept.append((name, result)))

    async def _send(self, name: str, request: Request) -> Reply:
        self.asked.append((name, int(request.labels["number"])))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return Reply(latency_s=1.0, content=name, text=name)


async def test_one_request_is_in_flight_and_the_first_server_changes() -> None:
    servers = Servers("ab")
    await asyncio.gather(*(servers.turns.send(ask(number)) for number in range(3)))
    assert servers.asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert servers.most == 1


async def test_results_are_kept_by_server_and_the_session_gets_the_first_ones_reply() -> None:
    servers = Servers("ab")
    replies = [await servers.turns.send(ask(number)) for number in range(2)]
    assert [reply.content for reply in replies] == ["a", "a"]
    assert [(name, result.labels["number"]) for name, result in servers.kept] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    assert {result.reply.content for _, result in servers.kept} == {""}


async def test_two_servers_get_the_same_conversations() -> None:
    workload = MultiRoundQA(
        users=2, rounds=2, qps=100.0, system_tokens=5, history_tokens=5, answer_tokens=3
    )
    measured = {"a": LoadMeasurement(), "b": LoadMeasurement()}
    kept: list[str] = []
    async with serving() as one, serving() as two:
        await measure_in_turns(
            {"a": Endpoint(one.base_url, "model"), "b": Endpoint(two.base_url, "model")},
            workload,
            TokenPrompts(),
            measured,
            prewarm=0,
            progress_s=30.0,
            keep=lambda name, _: kept.append(name),
        )
        prompts = [
            [seen.body["prompt"] for seen in server.seen if seen.method == "POST"]
            for server in (one, two)
        ]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 3
    assert kept == ["a", "b"] * 3
    assert {name: len(own.results) for name, own in measured.items()} == {"a": 3, "b": 3}
