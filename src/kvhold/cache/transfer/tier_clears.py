"""Clears of one tier, or of memory, alone. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass

from kvhold.cache.transfer.commands import ClearTierCommand, Command
from kvhold.cache.transfer.named_tiers import find_tier
from kvhold.core.status import MEMORY


@dataclass(frozen=True)
class ClearableTier:
    """refusal: why it cannot be cleared alone"""

    number: int
    refusal: str | None = None


class TierClears:
    def __init__(
        self, give_command: Callable[[Command], None], clear_memory: Callable[[bytes], int]
    ) -> None:
        self.tiers: dict[str, ClearableTier] = {}
        self._give_command = give_command
        self._clear_memory = clear_memory
        self._num_running = 0

    def __len__(self) -> int:
        return self._num_running

    def begin(self, name: str, prefix: bytes) -> int:
        """Return the number of removed chunks in memory. Raises ConfigError."""
        if name == MEMORY:
            return self._clear_memory(prefix)
        tier = find_tier(self.tiers, name)
        self._num_running += 1
        self._give_command(ClearTierCommand(tier.number, prefix))
        return 0

    def ended(self) -> None:
        self._num_running -= 1
