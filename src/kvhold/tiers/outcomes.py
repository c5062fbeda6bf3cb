import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic

from kvhold.core.reasons import Reason
from kvhold.tiers.base import Origin
from kvhold.tiers.calls import Result


@dataclass(frozen=True)
class TierOutcome(Generic[Result]):
    """One answer per key.

    pending: a task that still uses the caller's memory, which must stay reserved
    failed:  of a read: true for a fault, false for a plain miss
    why:     of a read: the reason of an item that is missing
    """

    items: list[Result]
    pending: "asyncio.Task[Any] | None" = None
    failed: list[bool] = field(default_factory=list)
    why: list[Reason] = field(default_factory=list)
    origins: list[Origin | None] = field(default_factory=list)


@dataclass
class Unknown:
    """The reasons why lookups know too little.

    why:  the reason of all keys that no tier has; None: all tiers answered
    keys: single keys, each with the reason
    """

    why: Reason | None = None
    keys: dict[bytes, Reason] = field(default_factory=dict)
