"""Moves chunks between arena and tiers: probes, reads, writes behind, clears.

A thread with its own event loop. `submit` never blocks. Results reach the state through `post`,
under its lock or in its loop.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvhold.cache.state import CacheState
from kvhold.cache.transfer.commands import (
    ClearChunksCommand,
    ClearCommand,
    ClearTierCommand,
    Command,
    CopyCommand,
    DropCommand,
    FetchCommand,
    KeepTagsCommand,
    PeerCopyCommand,
    ProbeCommand,
    ReencodeCommand,
    StopCommand,
    TransferCommand,
    UsedCommand,
    WriteCommand,
)
from kvhold.cache.transfer.outbox import FrameCoding, Outbox, Write
from kvhold.cache.transfer.own_reads import read_own
from kvhold.cache.transfer.peer_copier import PeerCopier
from kvhold.cache.transfer.probes import answer_all, answers_of
from kvhold.cache.transfer.reencoder import Reencoder
from kvhold.cache.transfer.tags_file import TagsFile
from kvhold.cache.transfer.tasks import LEAVE_S, Tasks
from kvhold.cache.transfer.tier_copier import TierCopier
from kvhold.cache.transfer.tier_mover import TierMover
from kvhold.cache.transfer.tier_reader import TierReader
from kvhold.cache.transfer.tier_rules import check_coding, clearable, copyable, reencodable
from kvhold.cache.transfer.use_queue import keys_of
from kvhold.cache.transfer.watched_values import watch_values
from kvhold.cache.transfer.write_behind import WriteBehind
from kvhold.codecs import Codec, make_codec
from kvhold.codecs.frame import RAW
from kvhold.codecs.sealing import Keyring
from kvhold.core.api import CopyProgress, ReencodeProgress
from kvhold.core.cleanup import on_error
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAME_BYTES, NAMESPACE_BYTES
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import TIER_DOWN
from kvhold.core.status import CacheTierStatus, TiersStatus
from kvhold.core.tracing import Tracer
from kvhold.core.turns import next_turn
from kvhold.tiers.base import KeepsClears, Parts
from kvhold.tiers.bytes_by_age import BytesByAge
from kvhold.tiers.chunk_clears import ChunkClears
from kvhold.tiers.generations import ALL
from kvhold.tiers.guard import Guard
from kvhold.tiers.journal import ClearsJournal
from kvhold.tiers.outcomes import Unknown
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.channel import ChannelPlan
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.ram import Entry
from kvhold.tiers.stack import Stack, TierPlace, learning_tiers, make_stack
from kvhold.tiers.suppressed import PendingClear

log = logging.getLogger(__name__)

_THREADS = 2
_SPACES_AT_ONCE = 256


class TierWorker:
    def __init__(
        self,
        state: CacheState,
        stack: Stack,
        metrics: Metrics,
        post: Callable[[Callable[[], None]], None],
        keyring: Keyring | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        journal: ClearsJournal | None = None,
        tags_file: TagsFile | None = None,
    ) -> None:
        """loop: to run in, without a thread; the caller awaits `end`, not `close`"""
        self._tags_file = tags_file
        self._journal = journal
        # prefixes cleared by another host and not yet here, with a count
        self._barred: dict[bytes, int] = {}
        self._state = state
        self.ram = state.ram
        self._stack = stack
        self._metrics = metrics
        self._tracer_metrics: list[Metrics] = []
        self._post = post
        # requests wait for checks, but not for encoding
        self._checking = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvhold-check")
        self._encoding = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvhold-encode")
        self._shared = [guard for guard in stack.guards if guard.traits.shared]
        self._learning = list(learning_tiers(stack).values())
        self._uses = deque[UsedCommand]()
        self._new_spaces = deque[bytes]()
        if self._shared:
            self.ram.new_namespaces = self._new_spaces
        self._codings = [
            FrameCoding(guard.config.codec, keyring if guard.config.encrypt else None)
            for guard in stack.guards
        ]
        self._tasks = Tasks()
        self._write_behind = WriteBehind(
            self, stack.guards, metrics, codings=self._codings, encoding=self._encoding
        )
        self._pending_clears: set[asyncio.Future[Any]] = set()
        self._compiling: dict[str, asyncio.Future[Codec]] = {}
        self._remembering = asyncio.Lock()
        keyrings = [coding.keyring for coding in self._codings]
        self._reencoder, self._mover = self._make_job_runners(keyrings)
        self._copier = TierCopier(
            stack, self._write_behind, is_barred=self._is_barred, report=self._copied
        )
        self._peer_copier: PeerCopier | None = None
        if (peers_tier := self.peers_tier) is not None:
            self._peer_copier = PeerCopier(peers_tier, self._tasks, report=self._copied)
            state.copies.find_peer = peers_tier.address_to_load
        self._jobs: dict[int, asyncio.Task[Any]] = {}
        self._loop = loop or asyncio.new_event_loop()
        self.reader = TierReader(
            state,
            stack,
            metrics,
            self._tasks,
            keyrings=keyrings,
            checking=self._checking,
            post=post,
        )
        self._loop.call_soon(self._begin)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvhold-tiers", daemon=True)
        if loop is None:
            self._thread.start()

    def _make_job_runners(self, keyrings: Sequence[Keyring | None]) -> tuple[Reencoder, TierMover]:
        now, stack, metrics = self.ram.now, self._stack, self._metrics
        reencoder = Reencoder(
            stack, keyrings, metrics, self._encoding, report=self._reencode_progressed, now=now
        )
        mover = TierMover(
            stack,
            self._codings,
            metrics,
            self._encoding,
            is_barred=self._is_barred,
            report=self._moved,
            now=now,
        )
        return reencoder, mover

    @property
    def peers_tier(self) -> PeersTier | None:
        return next(
            (guard.tier for guard in self._stack.guards if isinstance(guard.tier, PeersTier)), None
        )

    def trace(self, tracer: Tracer, metrics: Metrics) -> None:
        """Call it before any command. metrics: the tracer's"""
        self._stack.tracer = self.reader.tracer = tracer
        self._tracer_metrics = [metrics]

    def submit(self, commands: Sequence[Command]) -> None:
        if commands and not self._closed:
            self._loop.call_soon_threadsafe(self._accept, commands)

    def held(self) -> dict[str, list[BytesByAge]]:
        """Any thread."""
        return {guard.name: held for guard in self._stack.guards if (held := guard.held)}

    def status(self) -> TiersStatus:
        tiers: list[CacheTierStatus] = [
            {
                **of_tier,
                "codec": coding.codec,
                "codec_ready": self._is_ready(coding.codec),
                "encrypted": coding.keyring is not None,
            }
            for of_tier, coding in zip(self._stack.status(), self._codings, strict=True)
        ]
        counters: dict[str, float] = {}
        for metrics in self.metrics:
            counters |= metrics.as_dict()
        return {"tiers": tiers, "tier_counters": counters}

    @property
    def metrics(self) -> list[Metrics]:
        peers_tier = self.peers_tier
        of_peers = [] if peers_tier is None else [peers_tier.metrics]
        return [self._metrics, *of_peers, *self._tracer_metrics]

    def _is_ready(self, codec: str) -> bool:
        return codec not in self._compiling or self._compiling[codec].done()

    def close(self, *, drain_timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self.end(drain_timeout_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for pool in (self._checking, self._encoding):
            pool.shutdown(wait=False, cancel_futures=True)

    async def end(self, drain_timeout_s: float) -> None:
        """Like `close`, but leave the loop running."""
        self._closed = True
        await self._write_behind.drain(drain_timeout_s)
        if self._pending_clears:  # kept in the journal for the next node
            await asyncio.wait(self._pending_clears, timeout=LEAVE_S)
        await asyncio.gather(self._write_behind.end(), self._tasks.end())
        await asyncio.wait((asyncio.ensure_future(self._stack.close()),), timeout=LEAVE_S)
        if self._journal is not None:
            await self._journal.close(LEAVE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _begin(self) -> None:
        if self._journal is not None:
            self._journal.begin([guard.place for guard in self._stack.guards])
        for guard, coding in zip(self._stack.guards, self._codings, strict=True):
            guard.share(
                self._learn,
                self._journal,
                may_hold=self._may_hold,
                holds=self._holds,
                remember=self._remember,
            )
            if self._journal is not None:
                guard.resume_clears(self._journal)
            if guard.traits.shared:
                self._tasks.start(self._refresh(guard))
            if not guard.read_only and coding.codec != RAW:
                self._compiling[coding.codec] = self._loop.run_in_executor(
                    self._encoding, make_codec, coding.codec
                )
        self._write_behind.start()
        self._tasks.start(self._stack.check())

    def _accept(self, commands: Sequence[Command]) -> None:
        self._use_new_spaces()
        for command in commands:
            match command:
                case ProbeCommand():
                    self._tasks.start(self._probe(command))
                case FetchCommand():
                    self.reader.fetch(command)
                case WriteCommand():
                    self._queue(command)
                case UsedCommand():
                    self._uses.append(command)
                    if len(self._uses) == 1:
                        self._tasks.start(self._learn_uses())
                case ClearCommand(prefix=prefix):
                    self._mover.spoil(prefix)
                    if not command.learned:
                        self._write_behind.drop(prefix)  # later writes stay
                    writing = self._write_behind.writing(prefix)
                    beginning = self._loop.create_task(self._begin_clear(command, writing))
                    self._pending_clears.add(beginning)
                    beginning.add_done_callback(self._pending_clears.discard)
                    self._tasks.start(self._clear(command, beginning))
                case ClearChunksCommand():
                    self._accept_chunk_clear(command)
                case KeepTagsCommand(namespace=namespace, tags=tags):
                    if self._tags_file is not None:
                        self._tags_file.add(namespace, tags)
                case ClearTierCommand():
                    self._accept_tier_clear(command)
                case ReencodeCommand(number=number):
                    self._start_job(number, self._reencoder.run(command))
                case TransferCommand(number=number):
                    for guard in self._shared:
                        guard.use(command.namespace)
                    self._start_job(number, self._mover.run(command))
                case DropCommand():
                    self._tasks.start(self._mover.drop(command))
                case CopyCommand():
                    for guard in self._shared:
                        guard.use(command.entries[0].key[:NAMESPACE_BYTES])
                    self._tasks.start(self._copier.run(command))
                case PeerCopyCommand():
                    assert self._peer_copier is not None, "found by its tier"
                    self._peer_copier.begin(command)
                case StopCommand(number=number):
                    if number in self._jobs:
                        self._jobs[number].cancel()
                    elif self._peer_copier is not None:
                        self._peer_copier.end(number)

    async def _probe(self, command: ProbeCommand) -> None:
        unknown, keys = Unknown(), command.all_keys
        with on_error(lambda: self._tell_probed(command, {}, Unknown(TIER_DOWN))):
            await self._meet(keys)
            places = await self._stack.probe(
                keys, unknown=unknown, trace=command.trace, tier=command.tier
            )
        self._tell_probed(command, places, unknown)

    def _tell_probed(
        self, command: ProbeCommand, places: dict[bytes, TierPlace], unknown: Unknown
    ) -> None:
        for answers in answers_of(command, places, unknown):
            self._post(partial(answer_all, self._state, answers))

    async def _meet(self, keys: Sequence[bytes]) -> None:
        """Apply other hosts' clears: a disk may have older chunks."""
        spaces = list(dict.fromkeys(key[:NAMESPACE_BYTES] for key in keys))
        for guard in self._shared:
            for space in spaces:
                guard.use(space)
            await guard.meet(spaces)

    def _queue(self, command: WriteCommand) -> None:
        for guard in self._shared:
            guard.use(command.entry.key[:NAMESPACE_BYTES])
        if self._is_barred(command.entry.key):
            self.written(command.number)
        else:
            self._write_behind.add(command)

    def read_for_peer(
        self, keys: Sequence[bytes], room: Sequence[int]
    ) -> "Future[list[Parts | None]]":
        """From this host's disks. Any thread.

        None: no such frame, or larger than its room.
        """
        return asyncio.run_coroutine_threadsafe(read_own(self._stack, keys, room), self._loop)

    async def _learn_uses(self) -> None:
        while self._uses:
            command = self._uses[0]
            try:
                for keys, are_whole in keys_of(command):
                    for tier in self._learning:
                        tier.used(
                            keys,
                            command.prompt,
                            command.value,
                            command.at_s,
                            are_whole=are_whole,
                        )
                    await next_turn()
            finally:
                self._uses.popleft()
                self._state.uses.done(command)

    def written(self, number: int) -> None:
        self._post(lambda: self._state.written(number))

    def found_damaged(self, entry: Entry) -> None:
        self._post(lambda: self._state.remove_damaged([entry], "writer"))

    def wrote_removed(self, guard: Guard, entries: Sequence[Entry]) -> None:
        """A clear stays pending until writes that began before it have ended."""

    def _reencode_progressed(self, number: int, progress: ReencodeProgress) -> None:
        self._post(lambda: self._state.reencode_progressed(number, progress))

    def _copied(
        self, number: int, are_there: list[bool], stopped: str, num_tokens: int | None = None
    ) -> None:
        self._post(lambda: self._state.copies.copied(number, are_there, stopped, num_tokens))

    def _start_job(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        job = self._jobs[number] = self._tasks.start(work)
        job.add_done_callback(lambda _: self._jobs.pop(number))

    def _moved(self, number: int, progress: CopyProgress) -> None:
        self._post(lambda: self._state.moves.progressed(number, progress))

    def _learn(self, prefix: bytes) -> None:
        log.info("another host has cleared %s", prefix.hex() or "everything")
        self._barred[prefix] = self._barred.get(prefix, 0) + 1
        self._write_behind.spoil(prefix)
        self._mover.spoil(prefix)
        for guard in self._stack.guards:
            if guard.traits.shared:
                guard.suppressed.tell(prefix)
            else:
                guard.hide(prefix)
        self._post(lambda: self._state.cleared_elsewhere(prefix))

    def _may_hold(self, space: bytes) -> bool:
        return self._holds(space) or len(self._shared) < len(self._stack.guards)

    def _holds(self, space: bytes) -> bool:
        return self.ram.used_bytes_of(space) > 0 or (space == ALL and self.ram.num_namespaces > 0)

    def _use_new_spaces(self) -> None:
        for _ in range(min(len(self._new_spaces), _SPACES_AT_ONCE)):
            space = self._new_spaces.popleft()
            for guard in self._shared:
                guard.use(space)

    def _announce(self, prefix: bytes) -> None:
        if prefix not in self._barred:
            for guard in self._shared:
                if isinstance(guard.tier, KeepsClears):
                    guard.tier.announce(prefix)

    def _is_barred(self, key: bytes) -> bool:
        return any(key.startswith(prefix) for prefix in self._barred)

    async def _refresh(self, guard: Guard) -> None:
        while True:
            await asyncio.sleep(guard.config.clears_check_s)
            while self._new_spaces:
                self._use_new_spaces()
                await next_turn()
            await guard.refresh()
            await self._remember()

    async def _remember(self) -> None:
        if self._journal is None:
            return
        async with self._remembering:  # else an earlier call may write last
            numbers = {guard.place: guard.generations for guard in self._shared}
            for guard in self._stack.guards:
                await guard.remember()
            await self._journal.reach(numbers)

    async def _begin_clear(
        self, command: ClearCommand, writing: list[tuple[Outbox, set[Write]]]
    ) -> tuple[list[tuple[Outbox, set[Write]]], list[tuple[Guard, PendingClear]]]:
        pending_clears = await self._stack.begin_clear(
            command.prefix, shared=not command.learned, asked_s=command.asked_s
        )
        for guard, pending_clear in pending_clears:
            if pending_clear.prefix != command.prefix:  # it replaces earlier clears of the prefix
                writing += self._write_behind.writing(pending_clear.prefix, guard)
        return writing, pending_clears

    async def _clear(self, command: ClearCommand, beginning: "asyncio.Task[Any]") -> None:
        """The journal comes first."""
        try:
            writing, pending_clears = await asyncio.shield(beginning)
            await self._write_behind.wait_for(writing)
            await self._mover.put_ended()
            if command.learned:
                self._barred[command.prefix] -= 1
                if not self._barred[command.prefix]:
                    del self._barred[command.prefix]
            await self._stack.end_clear(pending_clears)
            await self._remember()
            self._announce(command.prefix)
        finally:
            self._post(lambda: self._state.cleared(command.prefix, command.asked_s))

    def _accept_chunk_clear(self, command: ClearChunksCommand) -> None:
        self._mover.spoil_keys([key[:NAME_BYTES] for key in command.last_keys])
        begun = [
            (guard.chunk_clears, guard.chunk_clears.begin(command.last_keys))
            for guard in self._stack.guards
        ]
        remembering = asyncio.gather(*(clears.remember(number) for clears, number in begun))
        self._pending_clears.add(remembering)
        remembering.add_done_callback(self._pending_clears.discard)
        self._tasks.start(self._clear_chunks(command, begun, remembering))

    async def _clear_chunks(
        self,
        command: ClearChunksCommand,
        begun: Sequence[tuple[ChunkClears, int]],
        remembering: "asyncio.Future[Any]",
    ) -> None:
        clears = self._state.prompt_clears
        try:
            try:
                await asyncio.shield(remembering)
            finally:
                self._post(lambda: clears.hidden(command.namespace))
            await asyncio.gather(*(of_tier.end(number) for of_tier, number in begun))
        finally:
            self._post(clears.ended)

    def _accept_tier_clear(self, command: ClearTierCommand) -> None:
        guard = self._stack.guards[command.tier]
        self._write_behind.drop(command.prefix, guard)
        self._mover.spoil(command.prefix)
        writing = self._write_behind.writing(command.prefix, guard)
        beginning = self._loop.create_task(guard.begin_removal(command.prefix))
        self._pending_clears.add(beginning)
        beginning.add_done_callback(self._pending_clears.discard)
        self._tasks.start(self._clear_tier(guard, beginning, writing))

    async def _clear_tier(
        self,
        guard: Guard,
        beginning: "asyncio.Task[PendingClear]",
        writing: list[tuple[Outbox, set[Write]]],
    ) -> None:
        try:
            pending_clear = await asyncio.shield(beginning)
            # it may have replaced earlier clears of other prefixes
            writing += self._write_behind.writing(pending_clear.prefix, guard)
            await self._write_behind.wait_for(writing)
            await self._mover.put_ended()
            await guard.end_removal(pending_clear)
        finally:
            self._post(self._state.tier_clears.ended)


def make_tier_worker(
    config: Config,
    state: CacheState,
    post: Callable[[Callable[[], None]], None],
    clears_file: Path | None = None,
    tell_disks: Callable[[bytes, int], None] | None = None,
    plan: ChannelPlan | None = None,
    tell_places: Callable[[bytes, int, bool], None] | None = None,
    tags_path: Path | None = None,
) -> TierWorker | None:
    """None without tiers.

    tell_disks:  called with each value that peers may read, and its bytes; 0: removed
    plan:        of a tier of peers
    tell_places: called with each value of a disk, the tier's number from 1 on, and whether it is
                 there; of a shared store (`SeenGuard.watch`) with the negative number
    tags_path:   of tags, unless `clears_file` is set

    Raises ConfigError.
    """
    if not config.tiers:
        return None
    metrics = Metrics()
    stack = make_stack(config.tiers, plugins=config.plugins, metrics=metrics)
    for guard in stack.guards:
        check_coding(guard, config)
    if sum(isinstance(guard.tier, PeersTier) for guard in stack.guards) > 1:
        raise ConfigError("tiers: name all peers in one tier: peers://host-a:7711,host-b:7711")
    for guard in stack.guards:
        if isinstance(guard.tier, PeersTier):
            if config.peers.listen:
                guard.tier.check_serving(config.peers)
            if plan is not None:
                guard.tier.use_channel(plan)
    encrypted = any(guard.config.encrypt for guard in stack.guards)
    keyring = Keyring.read(config.encryption.keys) if encrypted else None
    _teach(stack, state, config.policy)
    for number, guard in enumerate(stack.guards, 1):
        watch_values(guard, number, tell_disks, tell_places)
    state.tier_names = [guard.name for guard in stack.guards]
    state.reencodings.tiers = reencodable(stack)
    state.copies.tiers = copyable(stack)
    state.tier_clears.tiers = clearable(stack)
    file = Path(config.clears_file).expanduser().absolute() if config.clears_file else clears_file
    tags_file = None
    if tags_path is not None:
        beside = Path(f"{file}.tags") if config.clears_file else tags_path
        tags_file = TagsFile(beside, any_owner=config.node.any_owner)
        state.tags.load(tags_file.read())
        state.keep_tags()
    return TierWorker(
        state,
        stack,
        metrics,
        post,
        keyring,
        journal=ClearsJournal(file, any_owner=config.node.any_owner) if file is not None else None,
        tags_file=tags_file,
    )


def _teach(stack: Stack, state: CacheState, policy: str) -> None:
    for name, tier in learning_tiers(stack).items():
        learned = state.ram.policy
        if not isinstance(learned, LearnedPolicy):
            raise ConfigError(
                f"tier {name}: policy=learned needs policy = 'learned' for memory, whose "
                f"statistics it uses, not {policy!r}"
            )
        tier.learn_from(learned.times.add_place())
        state.uses.begin()
