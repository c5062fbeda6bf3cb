"""Tags of namespaces, as digests, which a clear by tag compares."""

from collections.abc import Iterable
from hashlib import blake2b

from kvhold.core.encoding import canonical
from kvhold.core.errors import ConfigError

TAG_BYTES = 16
MOST_TAGS = 64
MOST_TAG = 200  # characters of a tag in a clear

_OWN = "kvhold."


def tag_digest(name: str, value: str) -> bytes:
    content = canonical(["kvhold-tag-1", name, value])
    return blake2b(content, digest_size=TAG_BYTES).digest()


def tag_digests(tags: Iterable[tuple[str, str]]) -> bytes:
    """Joined. A budget for loss is no tag of a user."""
    return b"".join(sorted({tag_digest(*tag) for tag in tags if not tag[0].startswith(_OWN)}))


def parse_tag(text: str) -> tuple[str, str]:
    """NAME=VALUE. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals or not name or len(text) > MOST_TAG:
        raise ConfigError(
            f"tag {text[:MOST_TAG]!r}: write NAME=VALUE, at most {MOST_TAG} characters"
        )
    return name, value
