from dataclasses import dataclass

from kvhold.core.setting import setting, size


@dataclass(frozen=True)
class HintsConfig:
    """Hints come with requests, so their senders need not be trusted as the settings are."""

    actions: tuple[str, ...] = setting(
        (),
        "actions that requests may ask for, such as `pin retain prefetch demote`; empty: every "
        "hint is answered with rejected (vLLM)",
        choices=("pin", "retain", "prefetch", "demote", "share", "fetch"),
    )
    sessions: bool = setting(
        False,
        "a newer turn of a session makes chunks go first in eviction that only the older turn "
        "needs, and ends its retains (vLLM)",
    )
    max_ttl_s: float = setting(
        3600.0,
        "longest time for which a hint keeps KV in memory; longer ones are clipped (vLLM)",
        minimum=1,
    )
    max_bytes: int = size(
        0, "most memory that hints keep, of all engines of a node; 0: a quarter of memory"
    )
