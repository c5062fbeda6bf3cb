import msgspec


class LookupShare(msgspec.Struct, frozen=True, array_like=True):
    """Since it is kept apart.

    kind: `all`, `tenant`, `client` or `session` (of a tenant)
    """

    kind: str
    tenant: str
    name: str
    lookups: int
    asked_tokens: int
    hit_tokens: int


AGES_S = (3600, 6 * 3600, 86_400, 7 * 86_400)


class HeldAges(msgspec.Struct, frozen=True):
    """place:  `ram`, or a disk's name
    by_age: bytes stored there within each of `AGES_S`, to half an hour, and older ones
    """

    tenant: str
    place: str
    by_age: list[int]


class PromptWorth(msgspec.Struct, frozen=True):
    """A prompt's beginning where hits end, or a session's latest turn.

    prompt:     hash of its last chunk
    held_bytes: in memory, estimated
    hits:       since it is kept apart
    saved_s:    None: no engine has reported its speed
    pinned:     as far as it is in memory
    """

    namespace: str
    prompt: str
    tenant: str
    session: str
    num_tokens: int
    nbytes: int
    held_bytes: int
    hits: int
    hit_tokens: int
    saved_s: float | None
    pinned: bool
