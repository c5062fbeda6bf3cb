"""Namespaces by the first digits of their digests, as people write them."""

import re
from dataclasses import dataclass
from functools import cached_property

from kvhold.core.errors import NodeError
from kvhold.core.keys import NAMESPACE_BYTES, Namespace, spans_of
from kvhold.core.naming import unpack
from kvhold.net.messages import KnownSpace
from kvhold.node.client import NodeClient

_DIGITS = 2 * NAMESPACE_BYTES
_SHOWN = 40
_HASHING = repr(Namespace.hashing)


class NoSuchNamespace(NodeError):
    """None, or several, have these digits."""


@dataclass(frozen=True)
class DigestNamespace(Namespace):
    """Only digest, layout and shards are known."""

    known_digest: bytes = b""

    @cached_property
    def digest(self) -> bytes:
        return spans_of(self.known_digest) if self.is_of_spans else self.known_digest


def find_namespace(client: NodeClient, digits: str) -> KnownSpace:
    """Raises NoSuchNamespace: no engine has registered it."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{1,{_DIGITS}}}", digits):
        raise NoSuchNamespace(
            f"{digits[:_SHOWN]!r} is no namespace: write the first hexadecimal digits of its "
            f"digest, at most {_DIGITS}; `kvhold names` lists them"
        )
    spaces, _, _ = client.names(digits.lower())
    if len(spaces) == 1:
        return spaces[0]
    what = (
        f"{len(spaces)} namespaces begin with"
        if spaces
        else "the node knows of no namespace that begins with"
    )
    raise NoSuchNamespace(f"{what} {digits!r}; `kvhold names` lists them")


def find_digest(client: NodeClient, digits: str) -> bytes:
    """As `find_namespace`; but a whole digest may be unknown to the node."""
    if re.fullmatch(rf"[0-9a-fA-F]{{{_DIGITS}}}", digits):
        return bytes.fromhex(digits)
    return find_namespace(client, digits).digest


def namespace_for_prompts(client: NodeClient, digits: str) -> Namespace:
    """Raises NoSuchNamespace."""
    space = find_namespace(client, digits)
    layout = client.layout_of(space.digest)
    described = unpack(space.description)
    facts = described.facts
    if layout is None:
        raise NoSuchNamespace(f"the node knows no layout of {digits!r}: its engine has gone")
    if facts.get("hashing") != _HASHING or not facts.get("shards", "").isdecimal():
        raise NoSuchNamespace(f"prompts of {digits!r} are not named by their tokens alone")
    return DigestNamespace(
        "",
        layout,
        shards=int(facts["shards"]),
        title=described.title,
        known_digest=space.digest,
    )
