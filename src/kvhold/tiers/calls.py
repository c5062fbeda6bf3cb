import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

SCAN_TIMEOUT_S = 60.0
_PER_ITEM = ("probe", "get", "put", "replace", "delete")


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class TierCall(Generic[Result]):
    operation: str
    keys: int
    deadline_s: float
    result: Result | None = None
    pending: "asyncio.Task[Any] | None" = None
    is_vital: bool = True  # its faults count for the breaker
    began_s: float = field(default_factory=now)

    def check(self, result: Any) -> None:
        if self.operation in _PER_ITEM and (
            not isinstance(result, list) or len(result) != self.keys
        ):
            raise ValueError(
                f"{self.operation} of {self.keys} keys was answered with {str(result)[:100]}"
            )
