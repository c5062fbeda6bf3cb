"""Tags of the namespaces that this host has met, for clears by tag. No I/O.

Of more than `MOST_KNOWN` namespaces, those met first are forgotten.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvhold.core.keys import NAMESPACE_BYTES, Query
from kvhold.core.tags import MOST_TAGS, TAG_BYTES

MOST_KNOWN = 1 << 16


@dataclass(frozen=True)
class KnownTags:
    """Of an earlier run.

    since_s:   Unix time from which on namespaces were met; None: never kept
    forgotten: number of namespaces
    """

    tags: Mapping[bytes, bytes] = field(default_factory=dict)
    since_s: float | None = None
    forgotten: int = 0


class NamespaceTags:
    def __init__(self, tell: Callable[[bytes, bytes], None] | None = None) -> None:
        """tell: called with each new namespace, and its tags"""
        self.since_s: float | None = None
        self.num_forgotten = 0
        self.tell = tell
        self._known: dict[bytes, bytes] = {}
        self._by_tag: dict[bytes, dict[bytes, None]] = {}

    def __contains__(self, namespace: bytes) -> bool:
        return namespace in self._known

    def load(self, known: KnownTags) -> None:
        """Before any other call."""
        self.since_s, self.num_forgotten = known.since_s, known.forgotten
        for namespace, tags in known.tags.items():
            self._add(namespace, tags)

    def learn(self, namespace: bytes, tags: bytes) -> None:
        """Tags: joined digests. Without any, known ones stay."""
        before = self._known.get(namespace)
        if before is not None and (not tags or tags == before):
            return
        if len(namespace) == NAMESPACE_BYTES and _are_tags(tags):
            self._add(namespace, tags)
            if self.tell is not None:
                self.tell(namespace, tags)

    def meet(self, query: Query) -> None:
        if query.tags:
            self.learn(query.namespace, query.tags)

    def carrying(self, tag: bytes) -> list[bytes]:
        return list(self._by_tag.get(tag, ()))

    def _add(self, namespace: bytes, tags: bytes) -> None:
        self._drop(namespace)
        self._known[namespace] = tags
        for tag in split_tags(tags):
            self._by_tag.setdefault(tag, {})[namespace] = None
        if len(self._known) > MOST_KNOWN:
            self._drop(next(iter(self._known)))
            self.num_forgotten += 1

    def _drop(self, namespace: bytes) -> None:
        for tag in split_tags(self._known.pop(namespace, b"")):
            spaces = self._by_tag[tag]
            spaces.pop(namespace, None)
            if not spaces:
                del self._by_tag[tag]


def split_tags(tags: bytes) -> list[bytes]:
    return list(dict.fromkeys(tags[at : at + TAG_BYTES] for at in range(0, len(tags), TAG_BYTES)))


def _are_tags(tags: bytes) -> bool:
    return len(tags) % TAG_BYTES == 0 and len(tags) <= MOST_TAGS * TAG_BYTES
