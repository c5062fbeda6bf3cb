import asyncio
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvhold.core.metrics import Metrics

Result = TypeVar("Result")

SCAN_TIMEOUT_S = 60.0
_PER_ITEM = ("probe", "get", "put", "replace", "delete")
_LIMITS = (0, 64 << 10, 1 << 20, 16 << 20)
_SIZES = ("", "64KiB", "1MiB", "16MiB", "larger")


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class TierCall(Generic[Result]):
    operation: str
    keys: int
    deadline_s: float
    nbytes: int = 0
    result: Result | None = None
    pending: "asyncio.Task[Any] | None" = None
    is_vital: bool = True  # its faults count for the breaker
    began_s: float = field(default_factory=now)

    def observe(self, metrics: Metrics, tier: str, seconds: float) -> None:
        size = _SIZES[bisect_left(_LIMITS, self.nbytes)]
        metrics.observe(
            "kvhold_tier_seconds", seconds, tier=tier, operation=self.operation, size=size
        )

    def check(self, result: Any) -> None:
        if self.operation in _PER_ITEM and (
            not isinstance(result, list) or len(result) != self.keys
        ):
            raise ValueError(
                f"{self.operation} of {self.keys} keys was answered with {str(result)[:100]}"
            )
