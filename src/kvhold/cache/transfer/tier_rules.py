"""What may be done with each tier of a stack."""

import logging

from kvhold.cache.loss import loss_warning
from kvhold.cache.transfer.copies import CopyTier
from kvhold.cache.transfer.reencodings import ReencodableTier
from kvhold.cache.transfer.tier_clears import ClearableTier
from kvhold.codecs import check_codec
from kvhold.codecs.registry import LOSES_NOTHING
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.tiers.guard import Guard
from kvhold.tiers.stack import Stack

log = logging.getLogger(__name__)


def check_coding(guard: Guard, config: Config) -> None:
    try:
        check_codec(guard.config.codec)
    except ConfigError as error:
        raise ConfigError(f"tier {guard.name}: {error}") from None
    if not guard.read_only and (warning := loss_warning(guard.config.codec, config.rules)):
        log.warning("tier %s: %s", guard.name, warning)
    if guard.config.encrypt and not config.encryption.keys:
        raise ConfigError(
            f"tier {guard.name}: encrypt is set, but encryption.keys is empty; set it, for example "
            "to =file:/etc/kvhold/key"
        )


def reencodable(stack: Stack) -> dict[str, ReencodableTier]:
    tiers: dict[str, ReencodableTier] = {}
    lossy_below: str | None = None
    for number, guard in reversed(list(enumerate(stack.guards))):
        tiers[guard.name] = ReencodableTier(
            number, guard.config.encrypt, _why_not_reencoded(guard), lossy_below
        )
        lossy_below = lossy_below if guard.config.codec in LOSES_NOTHING else guard.name
    return dict(reversed(tiers.items()))


def _why_not_reencoded(guard: Guard) -> str | None:
    if guard.traits.read_only:
        return f"nothing is written to {guard.traits.name}"
    if guard.config.read_only:
        return "it is read_only; set read_only to false to re-encode it"
    if not guard.traits.replaces:
        return f"{guard.traits.name} cannot replace a value in one step; clear the tier instead"
    return None


def copyable(stack: Stack) -> dict[str, CopyTier]:
    return {
        guard.name: CopyTier(
            number,
            guard.config.encrypt,
            "nothing is written to it" if guard.read_only else None,
        )
        for number, guard in enumerate(stack.guards)
    }


def clearable(stack: Stack) -> dict[str, ClearableTier]:
    return {
        guard.name: ClearableTier(number, _why_not_cleared(guard))
        for number, guard in enumerate(stack.guards)
    }


def _why_not_cleared(guard: Guard) -> str | None:
    if guard.read_only:
        return "nothing is written to it, so nothing can be removed"
    if guard.traits.shared and not guard.traits.lists:
        return "it cannot list its chunks; clear their namespaces on all tiers instead"
    return None
