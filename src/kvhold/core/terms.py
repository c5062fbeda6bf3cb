"""The options for storing chunks: their lifetime, their precision below memory, and their owner."""

from dataclasses import dataclass

MAX_TTL_S = float(1 << 40)
MAX_BITS = 64.0
MAX_TENANT = 64


@dataclass(frozen=True, slots=True)
class Terms:
    """The options for the chunks of one store.

    ttl_s:     seconds for which they may be used, in memory and in tiers; None: no limit
    max_error: the largest loss by a tier's codec: |decoded - original| in a layer, over the largest
               |original| in this layer. If the loss is larger, a more exact codec writes the chunk,
               and `lossless` at last. None: as the codec states; 0: no loss
    max_bits:  the most bits per element that a lossy codec may take, on average over a chunk. If it
               takes more, a stronger codec is tried, within max_error. None: no limit
    tenant:    the owner of the encryption key, for encrypted tiers; "": the common key

    Raises ValueError, which names the field.
    """

    ttl_s: float | None = None
    max_error: float | None = None
    max_bits: float | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        for name, most in (("ttl_s", MAX_TTL_S), ("max_error", 1.0), ("max_bits", MAX_BITS)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; it must be from 0 to {most:g}")
        if len(self.tenant) > MAX_TENANT or not self.tenant.isprintable():
            raise ValueError(
                f"tenant {self.tenant[:80]!r} is not a name of at most {MAX_TENANT} characters"
            )


FREE = Terms()
