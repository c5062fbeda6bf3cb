from collections.abc import Callable

from kvhold.tiers.base import TellsChanges, ValueChanges
from kvhold.tiers.guard import Guard
from kvhold.tiers.seen_guard import SeenGuard


def watch_values(
    guard: Guard,
    number: int,
    tell_disks: Callable[[bytes, int], None] | None,
    tell_places: Callable[[bytes, int, bool], None] | None,
) -> None:
    if isinstance(guard, SeenGuard) and tell_places is not None:
        guard.watch(lambda key, present: tell_places(key, -number, present))
    changes = _local_values(guard)
    if changes is None:
        return
    if own_values(guard) is None:
        tell_disks = None

    def tell(key: bytes, nbytes: int) -> None:
        if tell_disks is not None:
            tell_disks(key, nbytes)
        if tell_places is not None:
            tell_places(key, number, nbytes > 0)

    if tell_places is not None:
        changes.tell = tell
    elif tell_disks is not None:
        changes.tell = tell_disks


def own_values(guard: Guard) -> ValueChanges | None:
    """Of a disk that peers may read."""
    return None if guard.config.encrypt else _local_values(guard)


def _local_values(guard: Guard) -> ValueChanges | None:
    if guard.traits.shared or not isinstance(guard.tier, TellsChanges):
        return None
    return guard.tier.changes
