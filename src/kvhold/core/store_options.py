from dataclasses import dataclass

from kvhold.core.tags import MOST_TAGS, TAG_BYTES

MAX_TTL_S = float(1 << 40)
MAX_BITS = 64.0
MAX_TENANT = 64


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Raises ValueError that names the field.

    Lossy codecs also need `Namespace.allowing_loss`.

    max_error: the most |decoded - original| over the largest |original| of a layer. None: as the
               codec states; 0: no loss
    max_bits:  the most bits per element of a lossy codec, on average, within max_error
    tenant:    owner of the encryption key; "": the common key
    tags:      of the namespace (`core.tags.tag_digests`)
    """

    ttl_s: float | None = None
    max_error: float | None = None
    max_bits: float | None = None
    tenant: str = ""
    tags: bytes = b""

    def __post_init__(self) -> None:
        for name, most in (("ttl_s", MAX_TTL_S), ("max_error", 1.0), ("max_bits", MAX_BITS)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; it must be from 0 to {most:g}")
        if len(self.tenant) > MAX_TENANT or not self.tenant.isprintable():
            raise ValueError(
                f"tenant {self.tenant[:80]!r} is not a name of at most {MAX_TENANT} characters"
            )
        num_tags, rest = divmod(len(self.tags), TAG_BYTES)
        if rest or num_tags > MOST_TAGS:
            raise ValueError(f"tags: {num_tags} tags; at most {MOST_TAGS} are allowed")

    @property
    def allows_loss(self) -> bool:
        return self.max_error != 0 and (self.max_error, self.max_bits) != (None, None)


DEFAULT_OPTIONS = StoreOptions()
