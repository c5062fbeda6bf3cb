"""Clears that a folder has missed, when it is back. Runs in the guard's loop."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from kvhold.core.keys import KEY_BYTES
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.suppressed import PendingClear

if TYPE_CHECKING:
    from kvhold.tiers.guard import Guard


class FolderClears:
    def __init__(self, guard: "Guard", journal: ClearsJournal) -> None:
        self._guard = guard
        self._journal = journal
        self._folders: dict[str, str] = {}
        self._clearing: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def meet(self, path: str, identity: str) -> None:
        missed = await self._journal.meet(self._guard.place, path, identity)
        if self._is_closing:
            return
        suppressed = self._guard.suppressed
        prefixes = [prefix for prefix in missed if len(prefix) < KEY_BYTES]
        chunks = [prefix for prefix in missed if len(prefix) == KEY_BYTES]
        is_other = self._folders.setdefault(path, identity) != identity
        if is_other:
            # a running clear may have read only the earlier folder
            prefixes += suppressed.all_due
        self._folders[path] = identity
        for prefix in dict.fromkeys(prefixes):
            # a clear that is not due yet will read this folder too
            if suppressed.due(prefix) or not suppressed.number(prefix):
                pending_clear = PendingClear(prefix, suppressed.add(prefix))
                self._start(self._guard.clears.begin_again(pending_clear))
        if chunks or (is_other and self._guard.chunk_clears.num_pending):
            self._start(self._guard.chunk_clears.begin_again(chunks))

    async def close(self) -> None:
        self._is_closing = True
        for clearing in self._clearing:
            clearing.cancel()
        if self._clearing:
            await asyncio.wait(self._clearing)

    def _start(self, clearing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(clearing)
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
