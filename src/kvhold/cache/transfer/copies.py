"""Copies of prompts from memory to a tier or a peer, in parts. No I/O.

A part's chunks are held until the tier or the peer has answered.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvhold.cache.chores import Turns
from kvhold.cache.index.names import chunk_names, tail_names
from kvhold.cache.index.presence import Presence
from kvhold.cache.transfer.commands import (
    Command,
    CopyCommand,
    PeerCopyCommand,
    StopCommand,
)
from kvhold.cache.transfer.named_tiers import find_tier
from kvhold.core.api import CopyProgress
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Query, place_suffix
from kvhold.core.layout import Layout
from kvhold.core.status import MEMORY
from kvhold.core.store_options import StoreOptions
from kvhold.tiers.ram import Entry, RamTier

PEER = "host:"  # before a peer's name, in the place of a tier's
_MOST_COPIES = 64
_PART_BYTES = 64 << 20
_PART_CHUNKS = 250
_SHARE = 8  # of memory, that one part holds at most
_STEP_KEYS = 64


@dataclass(frozen=True)
class CopyTier:
    """refusal: why nothing can be copied to it"""

    number: int
    encrypted: bool = False
    refusal: str | None = None


@dataclass(frozen=True)
class CopyRequest:
    """drop:      remove each chunk from the source when the tier has it
    query:     None: all chunks of `namespace`
    """

    tier: str
    query: Query | None
    drop: bool = False
    source: str = MEMORY
    namespace: bytes = b""

    @property
    def space(self) -> bytes:
        return self.namespace if self.query is None else self.query.namespace


@dataclass
class _Copy:
    owner: Hashable
    request: CopyRequest
    layout: Layout
    tenant: str
    tier: int
    keys: Iterator[bytes]
    peer: str = ""
    num_tokens: int = 0
    is_last: bool = False
    held: list[Entry] = field(default_factory=list)
    is_written: bool = False
    progress: CopyProgress = field(default_factory=CopyProgress)


class PromptCopies:
    def __init__(
        self,
        ram: RamTier,
        give_command: Callable[[Command], None],
        *,
        run: Callable[[Turns[None], int], None],
        tenant_of: Callable[[bytes], str | None],
    ) -> None:
        """tenant_of: a namespace's only tenant; None: unknown, or several"""
        self.tiers: dict[str, CopyTier] = {}
        self.find_peer: Callable[[str], str] = _no_peers
        """Returns its address. Raises ConfigError."""
        self._ram = ram
        self._give_command = give_command
        self._run = run
        self.tenant_of = tenant_of
        self._copies: dict[int, _Copy] = {}
        self._left: dict[int, _Copy] = {}  # released, with chunks that the tier still reads

    def __len__(self) -> int:
        return sum(not copy.progress.done for copy in self._copies.values())

    def begin(
        self, number: int, owner: Hashable, request: CopyRequest, layout: Layout, num_keys: int
    ) -> None:
        """Raises ConfigError."""
        is_peer = request.tier.startswith(PEER)
        peer = self.find_peer(request.tier.removeprefix(PEER)) if is_peer else ""
        tier = CopyTier(-1) if is_peer else find_tier(self.tiers, request.tier)
        query, keys = request.query, _keys_under(self._ram, request.namespace)
        if query is not None:
            keys = _keys(query, layout)
        elif is_peer:
            raise ConfigError(f"{request.tier}: a peer loads prompts; name one")
        tenant = (query.tenant if query is not None else "") or self.tenant_of(request.space)
        if tenant is None and tier.encrypted:
            raise ConfigError(
                f"tier {request.tier} is encrypted, and the tenant whose key encrypts namespace "
                f"{request.space.hex()} is not known here"
            )
        if len(self._copies) >= _MOST_COPIES:
            raise ConfigError(f"{_MOST_COPIES} copies are running or not closed; close one first")
        self._copies[number] = _Copy(owner, request, layout, tenant or "", tier.number, keys, peer)
        self._run(self._go_on_turns(number), num_keys)

    def find(self, owner: Hashable, number: int) -> CopyProgress | None:
        copy = self._copies.get(number)
        return copy.progress if copy is not None and copy.owner == owner else None

    def copied(
        self, number: int, are_there: Sequence[bool], stopped: str, num_tokens: int | None = None
    ) -> None:
        """The tier no longer reads the chunks.

        are_there:  it has each of them
        num_tokens: at a peer, after its load
        """
        copy = self._left.pop(number, None) or self._copies[number]
        held, copy.held, copy.is_written = copy.held, [], False
        self._ram.unpin_all(held)
        stored = [entry for entry, is_there in zip(held, are_there, strict=True) if is_there]
        dropped = self._dropped(stored) if copy.request.drop else 0
        # chunks before a window are not needed there
        is_whole = num_tokens is not None and num_tokens >= max(1, copy.num_tokens)
        if num_tokens is not None and not is_whole:
            stopped = f"{copy.peer} has {num_tokens} of {copy.num_tokens} tokens: {stopped}"
        elif is_whole:
            stopped = ""
        progress = copy.progress
        copy.progress = replace(
            progress,
            done=bool(stopped) or copy.is_last,
            stopped=stopped,
            copied=progress.copied + len(stored),
            failed=progress.failed + (0 if is_whole else len(held) - len(stored)),
            dropped=progress.dropped + dropped,
            bytes=progress.bytes + sum(entry.nbytes for entry in stored),
        )
        if copy.progress.done:
            self._end_load(number, copy)
        elif number in self._copies:
            self._run(self._go_on_turns(number), len(held))

    def drop(self, number: int) -> None:
        copy = self._copies.pop(number)
        self._end_load(number, copy)
        if copy.is_written:
            self._left[number] = copy
        else:
            self._ram.unpin_all(copy.held)

    def drop_all(self, owner: Hashable) -> None:
        for number in [number for number, copy in self._copies.items() if copy.owner == owner]:
            self.drop(number)

    def _go_on_turns(self, number: int) -> Turns[None]:
        most_bytes = min(_PART_BYTES, self._ram.capacity_bytes // _SHARE)
        num_looked = num_bytes = 0
        copy = self._copies.get(number)
        query = None if copy is None else copy.request.query
        if copy is not None and copy.peer and query is not None and not copy.num_tokens:
            presence = Presence(query, copy.layout, self._ram.find)
            copy.num_tokens = (yield from presence.take_turns()).extent.num_tokens
        while (copy := self._copies.get(number)) is not None:
            key = next(copy.keys, None)
            if key is None:
                break
            if key and (entry := self._ram.find(key)) is not None:
                self._ram.hold(entry)
                copy.held.append(entry)
                num_bytes += entry.nbytes
                if num_bytes >= most_bytes or len(copy.held) >= _PART_CHUNKS:
                    break
            num_looked += 1
            if num_looked % _STEP_KEYS == 0:
                yield _STEP_KEYS
        if copy is None:
            return
        if copy.peer and query is not None:
            copy.is_last, copy.is_written = not copy.held, True
            self._give_command(PeerCopyCommand(number, copy.peer, query, list(copy.held)))
        elif copy.held:
            copy.is_written = True
            options = StoreOptions(max_error=0, tenant=copy.tenant)
            self._give_command(
                CopyCommand(number, copy.tier, list(copy.held), copy.layout, options)
            )
        else:
            copy.progress = replace(copy.progress, done=True)

    def _dropped(self, entries: Sequence[Entry]) -> int:
        """The last first: no chunk stays without the one before it."""
        return sum([self._ram.evict(entry) for entry in reversed(entries)])

    def _end_load(self, number: int, copy: _Copy) -> None:
        if copy.peer:
            self._give_command(StopCommand(number))


def _no_peers(name: str) -> str:
    raise ConfigError(f"{PEER}{name}: this node follows no peers (a tier peers://)")


def _keys(query: Query, layout: Layout) -> Iterator[bytes]:
    suffixes = [
        place_suffix(group, shard)
        for group in range(len(layout.groups))
        for shard in range(query.shards)
    ]
    for names in (chunk_names(query), tail_names(query)):
        for _, name in names:
            for suffix in suffixes:
                yield name + suffix


def _keys_under(ram: RamTier, namespace: bytes) -> Iterator[bytes]:
    """Other namespaces' keys are empty, as steps."""
    for part in ram.parts():
        for entry in part:
            yield entry.key if entry.key.startswith(namespace) else b""
