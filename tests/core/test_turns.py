import asyncio

from kvhold.core.turns import next_turn


async def test_other_ready_tasks_run_between_two_turns() -> None:
    order: list[str] = []

    async def work(name: str) -> None:
        for step in range(2):
            order.append(f"{name}{step}")
            await next_turn()

    await asyncio.gather(work("a"), work("b"))
    assert order == ["a0", "b0", "a1", "b1"]
