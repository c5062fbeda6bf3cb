"""The settings that every tier has."""

from dataclasses import dataclass

from kvhold.core.setting import setting, size


@dataclass(frozen=True)
class GuardConfig:
    name: str = setting("", "the tier's name in metrics and logs; empty: its scheme")
    read_only: bool = setting(False, "never write to the tier")
    codec: str = setting(
        "raw",
        "codec of written chunks: raw, lossless, or one with a loss (`kvhold bench codecs`)",
    )
    encrypt: bool = setting(
        False,
        "write encrypted frames, and read no others; the keys are in `encryption.keys`",
    )
    probe_timeout_s: float = setting(
        0.5, "deadline of a probe, which a lookup waits for", minimum=0.001
    )
    get_timeout_s: float = setting(5.0, "deadline of one batch of reads", minimum=0.001)
    put_timeout_s: float = setting(
        10.0, "deadline of one batch of writes, or of deletes", minimum=0.001
    )
    batch_bytes: int = size(
        0,
        "bytes of chunks in one call; a batch is checked while the next one is read; 0: the "
        "tier's own default",
    )
    concurrent_calls: int = setting(4, "calls at once", minimum=1)
    breaker_failures: int = setting(
        3, "failures in a row after which the tier is left alone", minimum=1
    )
    clears_check_s: float = setting(
        5.0, "how often to ask a shared tier for the clears of other hosts", minimum=0.001
    )
    breaker_pause_s: float = setting(
        1.0, "pause before it is tried again; grows with each failure, up to 30 s", minimum=0.001
    )
