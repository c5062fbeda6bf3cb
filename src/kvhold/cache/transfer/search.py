from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from kvhold.cache.computing import AnyWait
from kvhold.cache.index.missing import ExpectedChunk
from kvhold.cache.index.presence import Presence
from kvhold.cache.planner import Marks
from kvhold.cache.transfer.commands import ProbeCommand
from kvhold.cache.transfer.origins import Origins
from kvhold.core.api import Uses
from kvhold.core.keys import Query
from kvhold.core.layout import Layout
from kvhold.core.planning import ComputeCost, ComputeIntent, RequestInfo
from kvhold.core.reasons import Reason
from kvhold.core.tracing import TraceContext
from kvhold.tiers.ram import Entry
from kvhold.tiers.stack import TierPlace
from kvhold.tiers.table import KeyTable


@dataclass(eq=False)
class Search:
    """owner: None without a waiting request.

    here:       the hit made of `pinned`
    silent:     why a tier did not answer
    unknown:    keys that a tier could not answer, with reasons
    sample:     loads one chunk, to measure the tier
    hurried:    ends early: computing is faster
    idle:       no hit beyond `have_tokens`, even with the tiers
    missing:    the first chunk missing in memory, if expected back
    wait:       for another engine's computing, before the probe
    mark:       key; peers with it compute the prompt; empty: none
    has_begun:  another engine was seen computing it
    probes:     receives its first probe, to be sent with others; None: it is sent at once
    """

    owner: Hashable
    query: Query
    layout: Layout
    num_keys: int
    pinned: KeyTable[Entry] = field(default_factory=KeyTable)
    awaited: set[bytes] = field(default_factory=set)
    here: Presence[Entry] = field(init=False)
    probing: bool = True
    requesting: bool = False
    settling: bool = False
    places: dict[bytes, TierPlace] = field(default_factory=dict)
    silent: Reason | None = None
    unknown: dict[bytes, Reason] = field(default_factory=dict)
    sources: KeyTable[int] = field(default_factory=KeyTable)
    origins: Origins = field(default_factory=Origins)
    faults: dict[bytes, Reason] = field(default_factory=dict)
    cost: ComputeCost | None = None
    began_s: float = 0.0
    marks: Marks = field(default_factory=Marks)
    sample: bool = False
    hurried: bool = False
    have_tokens: int = 0
    idle: bool = False
    missing: ExpectedChunk | None = None
    intent: ComputeIntent | None = None
    wait: AnyWait | None = None
    futile: int = 0
    waited_s: float = 0.0
    is_announced: bool = False
    trace: TraceContext = ""
    mark: bytes = b""
    has_begun: bool = False
    asks_peers: bool = False
    probes: list[ProbeCommand] | None = None
    uses: Uses = "all"
    info: RequestInfo | None = None

    def __post_init__(self) -> None:
        self.forget_what_is_here()

    def forget_what_is_here(self) -> None:
        self.here = Presence(self.query, self.layout, self.pinned.get)

    @property
    def more(self) -> bool:
        return self.marks.plan is not None and bool(self.marks.plan.more_bytes)

    def forgo_more(self) -> None:
        if self.marks.plan is not None:
            self.marks.plan = replace(self.marks.plan, more_bytes={})

    @property
    def over(self) -> bool:
        return not (
            self.wait is not None or self.probing or self.requesting or self.awaited or self.more
        )

    def declines(self, key: bytes) -> bool:
        if self.cost is None or key in self.faults:
            return False
        return self.hurried if self.probing or key in self.awaited else key in self.places

    def would_have(self, find: Callable[[bytes], Entry | None]) -> "Presence[Entry | TierPlace]":
        """Failed and awaited chunks count as absent."""

        def anywhere(key: bytes) -> Entry | TierPlace | None:
            lost = key in self.faults or key in self.awaited
            return self.pinned.get(key) or (None if lost else find(key) or self.places.get(key))

        return Presence(self.query, self.layout, anywhere)
