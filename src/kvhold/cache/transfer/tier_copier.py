"""Writes parts of copies, one at a time. Runs in the tier worker's loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvhold.cache.transfer.commands import CopyCommand, WriteCommand
from kvhold.cache.transfer.write_behind import WriteBehind
from kvhold.tiers.stack import Stack


class TierCopier:
    def __init__(
        self,
        stack: Stack,
        write_behind: WriteBehind,
        *,
        is_barred: Callable[[bytes], bool],
        report: Callable[[int, list[bool], str], None],
    ) -> None:
        """is_barred: another host has cleared the key"""
        self._stack = stack
        self._write_behind = write_behind
        self._is_barred = is_barred
        self._report = report
        self._turn = asyncio.Lock()

    async def run(self, command: CopyCommand) -> None:
        guard = self._stack.guards[command.tier]
        async with self._turn:
            writes = [
                WriteCommand(command.number, entry, command.layout, command.store_options)
                for entry in command.entries
                if not self._is_barred(entry.key)
            ]
            keys = [entry.key for entry in command.entries]
            pending: list[asyncio.Task[Any]] = []
            silent: set[str] = set()
            await self._write_behind.write_now(command.tier, writes, pending)
            if pending:  # the tier may still read the memory
                await asyncio.wait(pending)
            sizes = await guard.probe(keys, silent)
        stopped = f"tier {guard.name} failed: {guard.last_fault}" if silent else ""
        self._report(command.number, [size is not None for size in sizes], stopped)
