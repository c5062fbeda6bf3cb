"""Names of chunks, equal on every host.

    Namespace(model="llama", layout=layout).prompt(tokens).chunk_key(0)    # 40 bytes

A key has the namespace's digest, a chained hash of the tokens up to the chunk's end, the group and
the shard (docs/format.md).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from operator import index, itemgetter
from struct import Struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvhold.core.encoding import Plain, canonical
from kvhold.core.layout import Layout
from kvhold.core.naming import NO_FACTS, Facts, pack
from kvhold.core.store_options import StoreOptions
from kvhold.core.tags import tag_digests
from kvhold.core.token_ids import as_tokens

NAMESPACE_BYTES = 16
HASH_BYTES = 20
NAME_BYTES = NAMESPACE_BYTES + HASH_BYTES  # of a key; group and shard follow
KEY_BYTES = NAME_BYTES + 4

_PERSON = b"kvhold-chunk-1"
_PERSON_WITH_INSERTS = b"kvhold-insert-1"
_NO_PARENT = bytes(HASH_BYTES)
_ONE_HASH = Struct(f"{HASH_BYTES}s")
_PERSON_OF_SPANS = b"kvhold-spans-1"
_LOSS_BIT, _SPANS_BIT = 1, 2  # of the digest's last byte
TENANT = "tenant"
_MAX_ERROR, _MAX_BITS = "kvhold.max_error", "kvhold.max_bits"  # tags


class ChunkNames(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks of one prompt.

    hashes:      HASH_BYTES per chunk
    tail_tokens: length of a final tail, else 0
    parent:      hash of the preceding chunk, or empty
    """

    namespace: bytes
    hashes: bytes
    tail_tokens: int = 0
    first_token: int = 0
    parent: bytes = b""

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def num_tokens(self, layout: Layout) -> npt.NDArray[np.int64]:
        """[n] int64"""
        counts = np.full(len(self), layout.tokens_per_chunk, dtype=np.int64)
        if self.tail_tokens:
            counts[-1] = self.tail_tokens
        return counts


class Query(msgspec.Struct, frozen=True, array_like=True):
    """A prompt in a lookup: whole chunks, then candidate tails.

    layout:       its fingerprint
    hashes:       HASH_BYTES per whole chunk
    tail_hashes:  shortest tail first
    tail_lengths: in tokens
    tenant:       owner of the KV, for encrypted tiers
    only:         shards, in order; empty: all
    tier:         the only one read; empty: all
    tags:         of the namespace (`core.tags.tag_digests`); empty: none, or unknown
    """

    namespace: bytes
    layout: bytes
    shards: int
    hashes: bytes
    tail_hashes: bytes = b""
    tail_lengths: tuple[int, ...] = ()
    tenant: str = ""
    only: tuple[int, ...] = ()
    tier: str = ""
    tags: bytes = b""

    @property
    def shard_numbers(self) -> Sequence[int]:
        return self.only or range(self.shards)

    @property
    def num_shards(self) -> int:
        return len(self.only) or self.shards

    def first_chunks(self, num_chunks: int) -> "Query":
        """The first whole chunks, without tails."""
        hashes = self.hashes[: num_chunks * HASH_BYTES]
        return msgspec.structs.replace(self, hashes=hashes, tail_hashes=b"", tail_lengths=())


@dataclass(frozen=True)
class Insert:
    """An image, video or audio in a prompt.

    digest: hash of everything that determines its KV, except its position
    """

    start: int
    length: int
    digest: bytes | str


@dataclass(frozen=True)
class Namespace:
    """All that must be equal for KV to be reusable.

    shards:     parallel ranks that hold different KV
    cache_salt: text that separates callers
    facts:      see `core.naming`
    title:      not in the digest
    """

    model: str
    layout: Layout
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    shards: int = 1
    lora: str = ""
    cache_salt: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    hashing: str = "tokens-1"
    facts: Facts = NO_FACTS
    is_of_spans: bool = False
    title: str = field(default="", compare=False)

    @cached_property
    def digest(self) -> bytes:
        fields: Plain = [
            self.model,
            self.revision,
            self.dtype,
            self.quantization,
            self.shards,
            self.lora,
            self.cache_salt,
            self.hashing,
        ]
        tags: Plain = [list(tag) for tag in sorted(self.tags)]
        parts: Plain = [
            "kvhold-namespace-3",
            fields,
            tags,
            self.layout.fingerprint,
            self.facts.digest,
        ]
        digest = bytearray(blake2b(canonical(parts), digest_size=NAMESPACE_BYTES).digest())
        digest[-1] &= ~(_LOSS_BIT | _SPANS_BIT)
        if any(name in (_MAX_ERROR, _MAX_BITS) for name, _ in self.tags):
            digest[-1] |= _LOSS_BIT
        return spans_of(bytes(digest)) if self.is_of_spans else bytes(digest)

    @cached_property
    def description(self) -> bytes:
        """Packed facts, without salt, tenant and secrets."""
        if not self.model:
            return b""
        layout = self.layout
        shown = {
            name: repr(getattr(self, name))
            for name in ("model", "revision", "dtype", "quantization", "shards", "lora", "hashing")
        }
        shown |= {"spans": "True"} if self.is_of_spans else {}
        shown |= {f"tag.{name}": repr(value) for name, value in self.tags if name != TENANT}
        shown |= {
            name: "set"
            for name, is_set in (("cache_salt", self.cache_salt), ("tenant", self.tenant))
            if is_set
        }
        shown |= {
            f"layout.{name}": repr(getattr(layout, name))
            for name in ("tokens_per_chunk", "tail_tokens")
        }
        for number, group in enumerate(layout.groups):
            shown |= {
                f"layout.groups[{number}].{f.name}": repr(getattr(group, f.name))
                for f in fields(group)
            }
        return pack(self.title or self.model, shown | dict(self.facts.items))

    @property
    def tenant(self) -> str:
        return dict(self.tags).get(TENANT, "")

    @cached_property
    def of_spans(self) -> "Namespace":
        """Of this model's spans: approximate, and never found by a prompt's lookup."""
        return replace(self, is_of_spans=True)

    def narrowed(
        self, *, lora: str = "", cache_salt: str = "", tags: Sequence[tuple[str, str]] = ()
    ) -> "Namespace":
        if not (lora or cache_salt or tags):
            return self
        if cache_salt and self.cache_salt:
            cache_salt = canonical([self.cache_salt, cache_salt]).hex()
        return replace(
            self,
            lora=lora or self.lora,
            cache_salt=cache_salt or self.cache_salt,
            tags=(*self.tags, *tags),
        )

    def allowing_loss(
        self, max_error: float | None = None, max_bits: float | None = None
    ) -> "Namespace":
        """Lossy codecs may encode its KV, within a budget (`StoreOptions`).

        max_error=0 allows no loss. Raises ValueError.
        """
        return self.narrowed(tags=budget_tags(StoreOptions(max_error=max_error, max_bits=max_bits)))

    def prompt(
        self,
        tokens: npt.ArrayLike,
        extras: Mapping[int, bytes] | None = None,
        *,
        inserts: Iterable[Insert] = (),
    ) -> "Prompt":
        """Raises ValueError that names the invalid field.

        tokens:  [n] integers, preferably int32
        extras:  by chunk, further bytes that determine its KV
        inserts: in any order, without overlap
        """
        checked = as_tokens(tokens)
        return Prompt(self, checked, extras or {}, as_inserts(inserts, len(checked)))


def budget_tags(store_options: StoreOptions) -> tuple[tuple[str, str], ...]:
    if not store_options.allows_loss:
        return ()
    budget = ((_MAX_ERROR, store_options.max_error), (_MAX_BITS, store_options.max_bits))
    return tuple((name, repr(float(value))) for name, value in budget if value is not None)


def as_inserts(inserts: Iterable[Insert], num_tokens: int) -> tuple[Insert, ...]:
    """Raises ValueError for an overlap, or an end beyond `num_tokens`."""
    checked = [
        (_as_insert(insert, f"inserts[{i}]", num_tokens), i) for i, insert in enumerate(inserts)
    ]
    checked.sort(key=lambda pair: pair[0].start)
    for (before, i), (after, j) in pairwise(checked):
        if after.start < before.start + before.length:
            raise ValueError(
                f"inserts[{j}].start is {after.start}, inside inserts[{i}] at "
                f"{_place(before)}; inserts must not overlap"
            )
    return tuple(insert for insert, _ in checked)


def _as_insert(insert: Any, name: str, num_tokens: int) -> Insert:
    if not isinstance(insert, Insert):
        raise ValueError(f"{name} is {insert!r}; it must be an Insert")
    numbers = {}
    for name_of, least in (("start", 0), ("length", 1)):
        value = getattr(insert, name_of)
        try:
            numbers[name_of] = index(value)
        except TypeError:
            raise ValueError(
                f"{name}.{name_of} is {value!r}; it must be a whole number of tokens"
            ) from None
        if isinstance(value, bool) or numbers[name_of] < least:
            raise ValueError(f"{name}.{name_of} is {value!r}; it must be {least} or more")
    digest: Any = insert.digest
    if not isinstance(digest, (bytes, str)) or not digest:
        raise ValueError(
            f"{name}.digest is {digest!r}; it must be the full hash of the content, as bytes "
            "or text, and not empty"
        )
    whole = Insert(**numbers, digest=digest)
    if whole.start + whole.length > num_tokens:
        raise ValueError(
            f"{name}.length is {whole.length}: it spans tokens {_place(whole)}, beyond the "
            f"prompt's {num_tokens} tokens"
        )
    return whole


def _place(insert: Insert) -> str:
    return f"{insert.start} to {insert.start + insert.length}"


class _Text(ABC):
    namespace: Namespace

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        pass

    @abstractmethod
    def _hashes(self, first: int, last: int) -> bytes: ...

    @abstractmethod
    def _tail_hash(self, num_tokens: int) -> bytes: ...

    @property
    def num_whole(self) -> int:
        return self.num_tokens // self.namespace.layout.tokens_per_chunk

    @property
    def tail_lengths(self) -> tuple[int, ...]:
        """In tokens: one per block end, or only the text's end."""
        step = self.namespace.layout.tail_tokens
        rest = self.num_tokens % self.namespace.layout.tokens_per_chunk
        if step == 1:
            return (rest,) if rest else ()
        return tuple(range(step, rest + 1, step)) if step else ()

    @property
    def chain(self) -> bytes:
        return self._hashes(0, self.num_whole)

    @property
    def tails(self) -> bytes:
        return b"".join(map(self._tail_hash, self.tail_lengths))

    def query(self, *, to_end: bool = False) -> Query:
        """to_end: with the tail to the text's end, also inside a block"""
        space, lengths, tails = self.namespace, self.tail_lengths, self.tails
        if to_end and (end := self.end()) is not None:
            lengths, tails = (*lengths, end.tail_tokens), tails + end.hashes
        return Query(
            space.digest,
            space.layout.fingerprint,
            space.shards,
            self.chain,
            tails,
            lengths,
            space.tenant,
            tags=tag_digests(space.tags),
        )

    def end(self) -> ChunkNames | None:
        """The tail to the text's end; None: this is a block's or chunk's end."""
        layout, whole = self.namespace.layout, self.num_whole
        first_token = whole * layout.tokens_per_chunk
        rest = self.num_tokens - first_token
        if not layout.tail_tokens or not rest % layout.tail_tokens:
            return None
        parent = self.hash_at(whole - 1) if whole else b""
        return ChunkNames(self.namespace.digest, self._tail_hash(rest), rest, first_token, parent)

    def chunks(self, first: int = 0, *, last: int | None = None, tail: bool = True) -> ChunkNames:
        """The whole chunks from `first` to before `last`, and the longest tail."""
        assert 0 <= first <= self.num_whole, "`first` is beyond the last whole chunk"
        hashes = self._hashes(first, self.num_whole if last is None else last)
        first_token = first * self.namespace.layout.tokens_per_chunk
        parent = self.hash_at(first - 1) if first else b""
        tail_tokens = 0
        if tail and (lengths := self.tail_lengths):
            assert last in (None, self.num_whole), "a tail follows the last whole chunk"
            tail_tokens = lengths[-1]
            hashes += self._tail_hash(tail_tokens)
        return ChunkNames(self.namespace.digest, hashes, tail_tokens, first_token, parent)

    def hash_at(self, chunk: int) -> bytes:
        assert 0 <= chunk < self.num_whole, "not a whole chunk of this prompt"
        return self._hashes(chunk, chunk + 1)

    def chunk_key(self, chunk: int, group: int = 0, shard: int = 0) -> bytes:
        return make_key(self.namespace.digest, self.hash_at(chunk), group, shard)


@dataclass(frozen=True, eq=False)
class Prompt(_Text):
    """`inserts` are sorted. After `until`, some may exceed the end."""

    namespace: Namespace
    tokens: npt.NDArray[np.int32]
    extras: Mapping[int, bytes]
    inserts: tuple[Insert, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def chain(self) -> bytes:
        size = self.namespace.layout.tokens_per_chunk
        return b"".join(self._links(0, _NO_PARENT, self._raw[: 4 * size * self.num_whole], size))

    @cached_property
    def tails(self) -> bytes:
        return super().tails

    def until(self, num_tokens: int) -> "Prompt":
        """Cut the prompt. Cut inserts are hashed whole."""
        assert 0 <= num_tokens <= self.num_tokens, "a prompt can only be cut"
        return replace(self, tokens=self.tokens[:num_tokens])

    def followed_by(self, tokens: npt.ArrayLike) -> "Prompt":
        """A copy with [n] more tokens. Raises ValueError."""
        return replace(self, tokens=np.concatenate([self.tokens, as_tokens(tokens)]))

    def growing(self) -> "GrowingPrompt":
        return GrowingPrompt(self)

    def _links(
        self, chunk: int, parent: bytes, raw: "memoryview | bytes", size: int
    ) -> list[bytes]:
        header, step, links = size.to_bytes(4, "little"), 4 * size, []
        start = chunk * self.namespace.layout.tokens_per_chunk
        is_text = not (self.inserts or self.extras)
        for at in range(0, len(raw), step):
            inserts = () if is_text else self._inserts_in(start, start + size)
            state = self._hash_with_inserts.copy() if inserts else self._hash.copy()
            state.update(parent + header)
            state.update(raw[at : at + step])
            if not is_text:
                extra = self.extras.get(chunk, b"")
                if inserts:
                    placed = [[insert.start, insert.length, insert.digest] for insert in inserts]
                    state.update(canonical([extra, placed]))
                elif extra:
                    state.update(extra)
                chunk, start = chunk + 1, start + size
            parent = state.digest()
            links.append(parent)
        return links

    @cached_property
    def _hash(self) -> blake2b:
        return blake2b(digest_size=HASH_BYTES, salt=self.namespace.digest, person=_PERSON)

    @cached_property
    def _hash_with_inserts(self) -> blake2b:
        return blake2b(
            digest_size=HASH_BYTES, salt=self.namespace.digest, person=_PERSON_WITH_INSERTS
        )

    @cached_property
    def _raw(self) -> memoryview:
        return (
            memoryview(self.tokens.tobytes())
            if self.tokens.flags.writeable
            else self.tokens.view(np.uint8).data
        )

    @cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        return [insert.start for insert in self.inserts], [
            insert.start + insert.length for insert in self.inserts
        ]

    def _inserts_in(self, start: int, end: int) -> tuple[Insert, ...]:
        begins, ends = self._edges
        return self.inserts[bisect_right(ends, start) : bisect_left(begins, end)]

    def _hashes(self, first: int, last: int) -> bytes:
        return self.chain[first * HASH_BYTES : last * HASH_BYTES]

    def _tail_hash(self, num_tokens: int) -> bytes:
        first = 4 * self.num_whole * self.namespace.layout.tokens_per_chunk
        parent = self.chain[-HASH_BYTES:] or _NO_PARENT
        return self._links(
            self.num_whole, parent, self._raw[first : first + 4 * num_tokens], num_tokens
        )[0]


class GrowingPrompt(_Text):
    """Appending n tokens costs O(n). One thread at a time."""

    def __init__(self, prompt: Prompt) -> None:
        self.namespace = prompt.namespace
        self._prompt = prompt
        self._hashed = bytearray(prompt.chain)
        self._rest = bytearray(
            prompt.tokens[prompt.num_whole * self.namespace.layout.tokens_per_chunk :].tobytes()
        )

    @property
    def num_tokens(self) -> int:
        return (
            len(self._hashed) // HASH_BYTES * self.namespace.layout.tokens_per_chunk
            + len(self._rest) // 4
        )

    def append(self, tokens: npt.ArrayLike) -> None:
        """[n] integers. Raises ValueError, and then changes nothing."""
        self._rest += as_tokens(tokens).tobytes()
        size = self.namespace.layout.tokens_per_chunk
        whole = len(self._rest) // (4 * size) * 4 * size
        if whole:
            links = self._prompt._links(
                len(self._hashed) // HASH_BYTES, self._parent, bytes(self._rest[:whole]), size
            )
            self._hashed += b"".join(links)
            del self._rest[:whole]

    @property
    def _parent(self) -> bytes:
        return bytes(self._hashed[-HASH_BYTES:]) or _NO_PARENT

    def _hashes(self, first: int, last: int) -> bytes:
        return bytes(self._hashed[first * HASH_BYTES : last * HASH_BYTES])

    def _tail_hash(self, num_tokens: int) -> bytes:
        return self._prompt._links(
            self.num_whole, self._parent, bytes(self._rest[: 4 * num_tokens]), num_tokens
        )[0]


def make_key(namespace: bytes, chain_hash: bytes, group: int, shard: int) -> bytes:
    return namespace + chain_hash + place_suffix(group, shard)


def allows_loss(key: bytes) -> bool:
    """key: may be a namespace's digest"""
    return bool(key[NAMESPACE_BYTES - 1] & _LOSS_BIT)


def spans_of(namespace: bytes) -> bytes:
    """The digest of `Namespace.of_spans`. namespace: a digest"""
    if is_span(namespace):
        return namespace
    digest = bytearray(
        blake2b(namespace, digest_size=NAMESPACE_BYTES, person=_PERSON_OF_SPANS).digest()
    )
    digest[-1] |= _LOSS_BIT | _SPANS_BIT
    return bytes(digest)


def is_span(key: bytes) -> bool:
    """key: may be a namespace's digest"""
    return key[NAMESPACE_BYTES - 1] & (_LOSS_BIT | _SPANS_BIT) == _LOSS_BIT | _SPANS_BIT


def split_hashes(hashes: bytes) -> Iterator[bytes]:
    return map(itemgetter(0), _ONE_HASH.iter_unpack(hashes))


def place_suffix(group: int, shard: int) -> bytes:
    """Group and shard, 2 bytes each, little-endian."""
    assert 0 <= group <= 0xFFFF and 0 <= shard <= 0xFFFF
    return (group | shard << 16).to_bytes(4, "little")


HANDED_OVER = place_suffix(0xFFFF, 0xFFFF)
"""Of a prompt's mark (`cache/peer_waits.py`), which is no chunk's key."""


@dataclass(frozen=True)
class KeyParts:
    namespace: bytes
    hash: bytes
    group: int
    shard: int


def split_key(key: bytes) -> KeyParts:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this has {len(key)}")
    place = int.from_bytes(key[-4:], "little")
    return KeyParts(
        key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:NAME_BYTES], place & 0xFFFF, place >> 16
    )
