"""No read after a clear: which clears *bind* a host's lookup.

`HostClears` is the rule for hosts that share a tier (decision 0026).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvhold.core.keys import HASH_BYTES, NAME_BYTES, NAMESPACE_BYTES
from kvhold.tiers.generations import ALL, GenerationTier, is_marker, marker_key
from kvhold.tiers.guard import Guard
from kvhold_lab.simulation.world import SimLoop, World

_GRACE_S = 5.0


@dataclass(eq=False)
class SimClear:
    """began:  number of its request
    done:   number of its answer; 0: none, or its host died before journalling it
    number: its generation in the shared tier; 0: none yet
    """

    host: int
    prefix: bytes
    began: int
    done: int = 0
    number: int = 0

    @property
    def space(self) -> bytes:
        return self.prefix or ALL


@dataclass(frozen=True)
class SimOrigin:
    """probed: number at the start of its probe
    born:   number of its first allocation; 0: unknown
    """

    probed: int
    shared: bool
    born: int = 0


class Promise(Protocol):
    stored: dict[bytes, int]

    def asked_to_clear(self, prefix: bytes, began: int) -> None: ...

    def cleared(self, prefix: bytes, began: int, done: int) -> None: ...

    def node_died(self, *, clears_done: bool) -> None:
        """clears_done: no clear was in progress"""

    def born(self, key: bytes, origin: SimOrigin | None, allocation: int) -> int:
        """Return the latest number at which the chunk may have been stored."""

    def binding(
        self, key: bytes, origin: SimOrigin | None, asked: int, asked_s: float
    ) -> Iterable[tuple[int, str]]:
        """Yield each binding clear's start, and the reason."""


class OneHost:
    """Every answered clear binds.

    A clear's prefix is that of keys: nothing, a namespace, or a chunk's name.
    """

    def __init__(self) -> None:
        self.stored: dict[bytes, int] = {}
        self._clears: dict[bytes, tuple[int, int]] = {}

    def asked_to_clear(self, prefix: bytes, began: int) -> None: ...

    def cleared(self, prefix: bytes, began: int, done: int) -> None:
        self._clears[prefix] = began, done

    def node_died(self, *, clears_done: bool) -> None:
        if not clears_done:
            self._clears.clear()

    def born(self, key: bytes, origin: SimOrigin | None, allocation: int) -> int:
        return self.stored.get(key, 0)

    def binding(
        self, key: bytes, origin: SimOrigin | None, asked: int, asked_s: float
    ) -> Iterator[tuple[int, str]]:
        for prefix in (b"", key[:NAMESPACE_BYTES], key[:NAME_BYTES]):
            began, done = self._clears.get(prefix, (0, 0))
            if done and asked > done:
                yield began, "a clear" if len(prefix) < NAME_BYTES else "its prompt's clear"


class Markers:
    def __init__(self, world: World) -> None:
        self._world = world
        self._since: dict[bytes, tuple[int, float]] = {}
        self._lost: dict[bytes, int] = {}

    def came(self, name: bytes) -> None:
        if is_marker(name) and name not in self._since:
            self._since[name] = self._world.number(), self._world.now
            self._world.note("marker %d of %s is there", *number_of(name))

    def went(self, name: bytes) -> None:
        if self._since.pop(name, None) is not None:
            self._lost[name] = self._world.number()
            self._world.note("marker %d of %s is lost", *number_of(name))

    def all_went(self) -> None:
        for name in list(self._since):
            self.went(name)

    def names(self) -> list[bytes]:
        return list(self._since)

    def was_lost(self, space: bytes, number: int, since: int) -> bool:
        return self._lost.get(marker_key(space, number), 0) > since

    def up_to(self, space: bytes, number: int) -> tuple[int, float] | None:
        since = [self._since.get(marker_key(space, one)) for one in range(1, number + 1)]
        return None if None in since else max(one for one in since if one is not None)


def number_of(name: bytes) -> tuple[int, str]:
    return int.from_bytes(
        name[NAMESPACE_BYTES:][len(b"kvhold-clear") : HASH_BYTES], "little"
    ), name[:4].hex()


@dataclass
class Shared:
    world: World
    markers: Markers
    clears: list[SimClear] = field(default_factory=list)
    stored: dict[bytes, int] = field(default_factory=dict)
    highest: dict[bytes, int] = field(default_factory=dict)
    # (store, name) -> `SimOrigin.born` of its latest value
    born: dict[tuple[str, bytes], int] = field(default_factory=dict)

    def forget(self, space: bytes) -> None:
        self.world.note(
            "a clear reuses a generation: earlier clears of %s are no longer checked",
            space[:4].hex(),
        )
        self.clears[:] = [clear for clear in self.clears if clear.space != space]


class HostClears:
    def __init__(self, shared: Shared, host: int) -> None:
        self.stored = shared.stored
        self.shared = shared
        self._host = host
        self._heard: dict[
            bytes, list[tuple[int, int]]
        ] = {}  # namespace -> (generation, since when lookups must respect it)
        self._began = 0
        self._began_s = 0.0
        self._faulty_s = 0.0
        self._has_failed = False
        self._guard: Guard | None = None
        self._loops: list[SimLoop] = []

    def node_began(self, guard: Guard, reached: dict[bytes, int], loops: list[SimLoop]) -> None:
        """reached: the generations in the node's journal"""
        world = self.shared.world
        self._began, self._began_s, self._has_failed = world.number(), world.now, False
        self._heard = {space: [(number, self._began)] for space, number in reached.items()}
        self._guard, self._loops, self._faulty_s = guard, loops, world.now
        tell = guard._fault

        def failed(*args: Any, **options: Any) -> None:
            self._has_failed, self._faulty_s = True, world.now
            tell(*args, **options)

        guard._fault = failed  # type: ignore[method-assign]
        self._loops[1].call_soon(self._watch, guard)

    def _watch(self, guard: Guard) -> None:
        tier: Any = guard._tier
        tell, advance, begin_next = tier._set, tier.advance, tier._begin_next

        def known(space: bytes, number: int) -> None:
            tell(space, number)
            self.shared.highest[space] = max(number, self.shared.highest.get(space, 0))
            self._loops[0].call_soon(self._hears, space, number)

        async def beginning(space: bytes, prefix: bytes) -> bool:
            shared = self.shared
            highest, began = shared.highest.get(space, 0), shared.world.number()
            is_first: bool = await begin_next(space, prefix)
            number = tier._number(space)
            if is_first and (number <= highest or shared.markers.was_lost(space, number, began)):
                shared.forget(space)
            return is_first

        async def advancing(prefix: bytes) -> bytes:
            clears = self.shared.clears
            waiting = [
                clear
                for clear in clears
                if clear.host == self._host and clear.prefix == prefix and not clear.number
            ]
            old: bytes = await advance(prefix)
            for clear in waiting:
                clear.number = tier._number(clear.space)
            return old

        tier._set, tier.advance, tier._begin_next = known, advancing, beginning

    def _hears(self, space: bytes, number: int) -> None:
        self._heard.setdefault(space, []).append((number, self.shared.world.number()))

    @property
    def known(self) -> dict[bytes, int]:
        tier: Any = self._guard._tier if self._guard is not None else None
        used = tier._used if isinstance(tier, GenerationTier) else ()
        return {
            space: max((number for number, _ in self._heard.get(space, ())), default=0)
            for space in used
        }

    def cleared(self, prefix: bytes, began: int, done: int) -> None:
        for clear in self.shared.clears:
            if clear.host == self._host and clear.began == began:
                clear.done = done

    def asked_to_clear(self, prefix: bytes, began: int) -> None:
        self.shared.clears.append(SimClear(self._host, prefix, began))

    def node_died(self, *, clears_done: bool) -> None:
        self._heard, self._guard = {}, None
        if not clears_done:
            clears = self.shared.clears
            clears[:] = [clear for clear in clears if clear.host != self._host or clear.number]
            for clear in clears:
                if clear.host == self._host:
                    clear.done = 0

    def born(self, key: bytes, origin: SimOrigin | None, allocation: int) -> int:
        if origin is None:
            return allocation
        return origin.born or self.stored.get(key, 0)

    def binding(
        self, key: bytes, origin: SimOrigin | None, asked: int, asked_s: float
    ) -> Iterator[tuple[int, str]]:
        for clear in self.shared.clears:
            if key.startswith(clear.prefix):
                why = self._why(clear, origin, asked, asked_s)
                if why:
                    yield clear.began, why

    def _why(self, clear: SimClear, origin: SimOrigin | None, asked: int, asked_s: float) -> str:
        if clear.host == self._host:
            return "a clear" if 0 < clear.done < asked else ""
        if not clear.number:
            return ""
        if any(
            number >= clear.number and since < asked
            for number, since in self._heard.get(clear.space, ())
        ):
            return f"a clear of host {clear.host}, which this host knows of"
        there = self.shared.markers.up_to(clear.space, clear.number)
        if there is None:
            return ""
        if origin is not None and origin.shared and there[0] < origin.probed:
            return f"a clear of host {clear.host}, whose marker was there before the probe"
        if (
            origin is not None
            and not origin.shared
            and there[0] < self._began
            and not self._has_failed
        ):
            return f"a clear of host {clear.host}, whose marker is older than this node"
        assert self._guard is not None
        if any(
            own.host == self._host and own.space == clear.space and not own.number
            for own in self.shared.clears
        ):
            return ""
        config = self._guard.config
        since_s = max(
            there[1], self._began_s, self._faulty_s, *(loop.stalled_until for loop in self._loops)
        )
        if asked_s > since_s + config.clears_check_s + config.probe_timeout_s + _GRACE_S:
            return f"a clear of host {clear.host}, more than {config.clears_check_s:g} s ago"
        return ""
