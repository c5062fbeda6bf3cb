"""On what terms chunks are stored: how long they last, what may be lost of them below memory, and whose they are."""

from dataclasses import dataclass

MAX_TTL_S = float(1 << 40)
MAX_BITS = 64.0
MAX_TENANT = 64


@dataclass(frozen=True, slots=True)
class Terms:
    """Of all chunks of one store.

    ttl_s:     they are not to be used after so long, here or below; None: no limit
    max_error: of what a tier's codec may lose: the largest |decoded - original| in a layer over the largest |original| in it. A chunk of
               which it loses more is written by a better one, at last by `lossless`. None: what the codec states; 0: nothing is lost
    max_bits:  the most bits that a codec with a loss is to take for an element, on average over a chunk; where it takes more, a stronger
               one is tried, as far as max_error goes. None: whatever the tier's codec takes
    tenant:    whose key they are encrypted with, where tiers are; "": the common one

    Raises ValueError that names the field.
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
            raise ValueError(f"tenant {self.tenant[:80]!r} is not a name of at most {MAX_TENANT} characters")


FREE = Terms()
