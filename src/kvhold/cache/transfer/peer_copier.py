"""Has peers load prompts from here. In the tier worker's loop."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from kvhold.cache.transfer.commands import PeerCopyCommand
from kvhold.cache.transfer.tasks import Tasks
from kvhold.core.errors import TierError
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.loading import PeerHeld, PeerLoading


class PeerCopier:
    def __init__(
        self,
        tier: PeersTier,
        tasks: Tasks,
        *,
        report: Callable[[int, list[bool], str, int | None], None],
    ) -> None:
        """report: see `PromptCopies.copied`"""
        self._tier = tier
        self._tasks = tasks
        self._report = report
        self._loadings: dict[int, PeerLoading] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}

    def begin(self, command: PeerCopyCommand) -> None:
        running = self._running[command.number] = self._tasks.start(self._run(command))
        # a task that is cancelled before its first step runs no `finally`
        running.add_done_callback(partial(self._ended, command))

    def end(self, number: int) -> None:
        if (running := self._running.pop(number, None)) is not None:
            running.cancel()
        if (loading := self._loadings.pop(number, None)) is not None:
            loading.close()

    async def _run(self, command: PeerCopyCommand) -> PeerHeld:
        number, keys = command.number, [entry.key for entry in command.entries]
        try:
            if number not in self._loadings:
                self._loadings[number] = await self._tier.load_at(command.address, command.query)
            return await self._loadings[number].holds(keys)
        except TierError as error:
            return PeerHeld([False] * len(keys), None, str(error))

    def _ended(self, command: PeerCopyCommand, running: "asyncio.Task[PeerHeld]") -> None:
        if running.cancelled() or running.exception() is not None:
            held = PeerHeld([False] * len(command.entries), None, "cancelled")
        else:
            held = running.result()
        self._report(command.number, held.are_here, held.fault, held.num_tokens)
