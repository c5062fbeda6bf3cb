from hashlib import blake2b

import msgspec

from kvhold.core.config import Config
from kvhold.core.errors import NodeError, ProtocolError
from kvhold.core.requirements import Missing, Requirements, TierTerms, compare, digest_of
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.registry import guard_settings
from kvhold.tiers.url import TierUrl, parse_url

_OF_THE_PLACE = ("endpoint", "prefix", "service")
_MOST_SHOWN = 120
_decoder = msgspec.msgpack.Decoder(Requirements)


def requirements_of(config: Config) -> Requirements:
    """Raises ConfigError: an invalid tier URL."""
    return Requirements(
        tiers=tuple(_terms(parse_url(text)) for text in config.tiers),
        keys=digest_of(config.encryption.keys),
        encrypted=config.node.require_encryption,
        refuse=config.node.on_mismatch == "refuse",
    )


def pack(requirements: Requirements) -> bytes:
    return msgspec.msgpack.encode(requirements)


def unpack(packed: bytes) -> Requirements:
    try:
        return _decoder.decode(packed) if packed else Requirements()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the requirements cannot be read: {str(error)[:100]}") from None


def check(required: Requirements, offered: Requirements) -> tuple[str, ...]:
    """Differences to warn of. Raises NodeError: do not join."""
    missing: Missing = compare(required, offered)
    fatal = missing.refused + (missing.different if required.refuse else ())
    if fatal:
        raise NodeError(
            f"{'; '.join(fatal)}. End that node (kvhold stop), and the next engine starts "
            "one with its own settings; "
            f"or give both the same `tiers` and `encryption`"
        )
    return missing.different


def _terms(url: TierUrl) -> TierTerms:
    guard: GuardConfig = guard_settings(url)
    hosts = url.netloc.rpartition("@")[2]
    options = sorted((name, value) for name, value in url.options.items() if name in _OF_THE_PLACE)
    place = repr((url.scheme, hosts, url.path, options)).encode()
    shown = f"{url.scheme}://{hosts}{url.path}"
    return TierTerms(
        place=blake2b(place, digest_size=12, person=b"kvhold-tierplace").digest(),
        shown=shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}...",
        kind=url.scheme.rpartition("+")[2],
        encrypt=guard.encrypt,
        codec=guard.codec,
    )
