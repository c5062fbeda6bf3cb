from collections.abc import Mapping
from difflib import get_close_matches
from typing import Protocol, TypeVar

from kvhold.core.errors import ConfigError


class NamedTier(Protocol):
    @property
    def refusal(self) -> str | None: ...


AnyTier = TypeVar("AnyTier", bound=NamedTier)


def find_tier(tiers: Mapping[str, AnyTier], name: str, *, refuses: bool = True) -> AnyTier:
    """Raises ConfigError: unknown, or it refuses."""
    tier = tiers.get(name)
    if tier is None:
        near = get_close_matches(name, tiers, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"tier {name!r} is unknown; known are "
            f"{', '.join(tiers) or 'none: this cache has only memory'}{hint}"
        )
    if refuses and tier.refusal is not None:
        raise ConfigError(f"tier {name}: {tier.refusal}")
    return tier
