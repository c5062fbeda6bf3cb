"""Has peers load prompts from here. In the tier worker's loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvhold.cache.transfer.commands import PeerCopyCommand
from kvhold.cache.transfer.tasks import Tasks
from kvhold.core.errors import TierError
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.loading import PeerLoading


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
        self._running[command.number] = self._tasks.start(self._run(command))

    def end(self, number: int) -> None:
        if (running := self._running.pop(number, None)) is not None:
            running.cancel()
        if (loading := self._loadings.pop(number, None)) is not None:
            loading.close()

    async def _run(self, command: PeerCopyCommand) -> None:
        number, keys = command.number, [entry.key for entry in command.entries]
        are_there, fault, num_tokens = [False] * len(keys), "cancelled", None
        try:
            if number not in self._loadings:
                self._loadings[number] = await self._tier.load_at(command.address, command.query)
            held = await self._loadings[number].holds(keys)
            are_there = [bool(one) for one in held.are_here]
            fault, num_tokens = held.fault, held.num_tokens
        except TierError as error:
            fault = str(error)
        finally:
            self._report(number, are_there, fault, num_tokens)
