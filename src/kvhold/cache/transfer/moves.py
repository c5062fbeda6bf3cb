"""Copies and moves between memory, tiers and peers, with their owners. No I/O.

From memory, `copies.py`; to memory, a hit that is pinned until its tier has dropped the chunks;
from tier to tier, `tier_mover.py`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec

from kvhold.cache.chores import Turns
from kvhold.cache.index.presence import Presence
from kvhold.cache.transfer.commands import Command, DropCommand, StopCommand, TransferCommand
from kvhold.cache.transfer.copies import PEER, CopyRequest, CopyTier, PromptCopies
from kvhold.cache.transfer.named_tiers import find_tier
from kvhold.core.api import CopyProgress, Found, Uses
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Query
from kvhold.core.layout import Layout
from kvhold.core.reasons import CLEARED, DEADLINE, NO_ROOM, REASONS, TIER_DOWN
from kvhold.core.status import MEMORY
from kvhold.tiers.ram import Entry

_MOST_MOVES = 64
_INCOMPLETE = frozenset({CLEARED, DEADLINE, NO_ROOM, TIER_DOWN})
"""Reasons why a hit ends before what the tier has."""


@dataclass(eq=False)
class _Move:
    """It owns the hit of its load to memory.

    is_dropping: the tier removes its chunks
    """

    name: ClassVar[str] = "a move"

    owner: Hashable
    request: CopyRequest
    source: int
    ticket: int = 0
    is_dropping: bool = False
    is_left: bool = False
    progress: CopyProgress = field(default_factory=CopyProgress)


class MoveHits(Protocol):
    def lookup_turns(self, owner: Hashable, query: Query, *, uses: Uses) -> Turns[Found]: ...

    def refresh_turns(self, ticket: int, *, settle: bool) -> Turns[Found]: ...

    def pinned_by(self, ticket: int) -> list[Entry]: ...

    def release_owner(self, owner: Hashable) -> None: ...


class Moves:
    def __init__(
        self,
        copies: PromptCopies,
        give_command: Callable[[Command], None],
        hits: MoveHits,
        *,
        begin: Callable[[Turns[None]], None],
    ) -> None:
        """begin: run turns in the background"""
        self._copies = copies
        self._give_command = give_command
        self._hits = hits
        self._begin = begin
        self._moves: dict[int, _Move] = {}
        self._by_ticket: dict[int, int] = {}

    def __len__(self) -> int:
        running = sum(not move.progress.done for move in self._moves.values())
        return running + len(self._copies)

    def begin(
        self, number: int, owner: Hashable, request: CopyRequest, layout: Layout, num_keys: int
    ) -> None:
        """Raises ConfigError."""
        if request.source == MEMORY:
            self._copies.begin(number, owner, request, layout, num_keys)
            return
        if len(self._moves) >= _MOST_MOVES:
            raise ConfigError(f"{_MOST_MOVES} moves are running or not closed; close one first")
        if request.tier == request.source:
            raise ConfigError(f"the chunks are in {request.source} already; name another tier")
        if request.tier.startswith(PEER):
            raise ConfigError("a peer loads from memory: move the chunks to ram first")
        source = find_tier(self._copies.tiers, request.source, refuses=request.drop)
        move = _Move(owner, request, source.number)
        if request.tier == MEMORY:
            if request.query is None:
                raise ConfigError("a namespace cannot be moved to memory; name a prompt")
            self._begin(self._load_turns(number, request.query))
        else:
            self._give_command(self._transfer(number, request, source, layout))
        self._moves[number] = move

    def find(self, owner: Hashable, number: int) -> CopyProgress | None:
        move = self._moves.get(number)
        if move is None:
            return self._copies.find(owner, number)
        return move.progress if move.owner == owner else None

    def drop(self, number: int) -> None:
        move = self._moves.get(number)
        if move is None:
            self._copies.drop(number)
        elif move.is_dropping:  # the tier's answer ends it
            move.is_left = True
        else:
            del self._moves[number]
            self._let_go(move)
            if move.request.tier != MEMORY and not move.progress.done:
                self._give_command(StopCommand(number))

    def drop_all(self, owner: Hashable) -> None:
        self._copies.drop_all(owner)
        for number in [number for number, move in self._moves.items() if move.owner == owner]:
            self.drop(number)

    def progressed(self, number: int, progress: CopyProgress) -> None:
        move = self._moves.get(number)
        if move is None:
            return
        if move.is_dropping:
            self._let_go(move)
            move.is_dropping = False
            stopped = move.progress.stopped or progress.stopped
            progress = msgspec.structs.replace(progress, stopped=stopped)
        move.progress = progress
        if move.is_left:
            del self._moves[number]

    def arrived(self, ticket: int) -> None:
        """A search is over."""
        number = self._by_ticket.get(ticket)
        if number is not None:
            self._begin(self._settle_turns(number))

    def _transfer(
        self, number: int, request: CopyRequest, source: CopyTier, layout: Layout
    ) -> TransferCommand:
        target = find_tier(self._copies.tiers, request.tier)
        named = "" if request.query is None else request.query.tenant
        tenant = named or self._copies.tenant_of(request.space)
        if tenant is None and (source.encrypted or target.encrypted):
            raise ConfigError(
                f"the tenant whose key encrypts namespace {request.space.hex()} is not known here"
            )
        keys = None
        if request.query is not None:
            keys = Presence(request.query, layout, _nothing).missing()
        return TransferCommand(
            number,
            source.number,
            target.number,
            request.space,
            keys,
            layout,
            tenant or "",
            request.drop,
        )

    def _load_turns(self, number: int, query: Query) -> Turns[None]:
        """The ticket is known in the step of the answer, so no end is missed."""
        move = self._moves.get(number)
        if move is None:
            return
        query = msgspec.structs.replace(query, tier=move.request.source)
        found = yield from self._hits.lookup_turns(move, query, uses="none")
        move.ticket = found.ticket
        if self._moves.get(number) is not move:
            self._let_go(move)
        elif found.arriving:
            self._by_ticket[found.ticket] = number
        else:
            self._settled(number, move, found)

    def _settle_turns(self, number: int) -> Turns[None]:
        move = self._moves.get(number)
        if move is not None and self._by_ticket.pop(move.ticket, None) is not None:
            found = yield from self._hits.refresh_turns(move.ticket, settle=True)
            if self._moves.get(number) is move:
                self._settled(number, move, found)
            else:
                self._let_go(move)

    def _settled(self, number: int, move: _Move, found: Found) -> None:
        entries = self._hits.pinned_by(found.ticket) if found.ticket else []
        nbytes = sum(entry.nbytes for entry in entries)
        stopped = ""
        if found.reason in _INCOMPLETE:
            stopped = f"{found.num_tokens} tokens are in memory: {REASONS[found.reason]}"
        is_dropping = move.request.drop and bool(entries)
        move.progress = CopyProgress(not is_dropping, stopped, len(entries), bytes=nbytes)
        if not is_dropping:
            self._let_go(move)
            return
        move.is_dropping = True
        self._give_command(
            DropCommand(number, move.source, [entry.key for entry in entries], nbytes)
        )

    def _let_go(self, move: _Move) -> None:
        self._by_ticket.pop(move.ticket, None)
        self._hits.release_owner(move)


def _nothing(_: bytes) -> None:
    return None
