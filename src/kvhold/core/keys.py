"""Names of chunks: the same bytes in every process and on every host.

    namespace = Namespace(model="llama", layout=layout)
    prompt = namespace.prompt(tokens)            # the keys of a prompt, hashed once
    prompt.chunk_key(0)                          # 40 bytes
    namespace.prompt(tokens, inserts=[Insert(start=5, length=576, digest=image_hash)])
    text = prompt.growing(); text.append([17])   # what is generated after it, hashed as it comes

A chunk's key is its namespace's digest, the chained hash of all tokens up to the chunk's end, the group and the shard. The chain is
blake2b (RFC 7693) with the namespace as salt: h[i] = H(h[i-1], number of tokens, tokens of chunk i, extra and inserts of chunk i). It is
keyed, so nobody guesses another namespace's keys from the same text, and 160 bits wide, so nobody makes two texts meet. A token is hashed
as int32, little-endian. No I/O; any thread, but a GrowingPrompt belongs to one at a time.
"""

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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

NAMESPACE_BYTES = 16
HASH_BYTES = 20
KEY_BYTES = NAMESPACE_BYTES + HASH_BYTES + 4

_PERSON = b"kvhold-chunk-1"
_PERSON_WITH_INSERTS = b"kvhold-insert-1"
_NO_PARENT = bytes(HASH_BYTES)
_ONE_HASH = Struct(f"{HASH_BYTES}s")
TENANT = "tenant"  # the tag that says whose KV it is


class ChunkNames(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks of one prompt in one namespace, by their token hashes.

    hashes:      HASH_BYTES each, end to end
    tail_tokens: tokens in the last one if that is a tail, 0 if all are whole
    first_token: the position in the prompt of the first one's first token (the position its keys are rotated for)
    parent:      the hash of the chunk before the first one; empty if that is the prompt's first
    """

    namespace: bytes
    hashes: bytes
    tail_tokens: int = 0
    first_token: int = 0
    parent: bytes = b""

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def num_tokens(self, layout: Layout) -> npt.NDArray[np.int64]:
        """[n] int64: tokens in each."""
        counts = np.full(len(self), layout.tokens_per_chunk, dtype=np.int64)
        if self.tail_tokens:
            counts[-1] = self.tail_tokens
        return counts


class Query(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as the cache is asked for it: its whole chunks, then the tails that may follow the last of them.

    layout:       fingerprint of the registered layout
    shards:       of how many shards each must be present
    hashes:       of the whole chunks, HASH_BYTES each
    tail_hashes, tail_lengths: the candidates for a tail, shortest first
    tenant:       whose KV it is, for tiers that are encrypted
    """

    namespace: bytes
    layout: bytes
    shards: int
    hashes: bytes
    tail_hashes: bytes = b""
    tail_lengths: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True)
class Insert:
    """Content in a prompt that is no text: an image, a video, audio. The tokens in its place say nothing about it.

    start, length: its place, in tokens of the prompt
    digest: a hash of all that its KV depends on but for its place, never cut short; bytes or text, which are never equal
    """

    start: int
    length: int
    digest: bytes | str


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal for KV to be reusable. Two namespaces that differ in any field share no key.

    shards:     into how many parts the model's KV is split (tensor times pipeline parallel ranks that hold different KV)
    cache_salt: a tenant's secret or any text that separates callers
    tags:       pairs of names and values that must match, in any order
    hashing:    what the token hashes are made from; engines with hashes of their own name them here
    facts:      whatever else the engine was configured with, by name; see `core.naming`
    title:      how the user calls the model; for people, no part of the name
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
    title: str = field(default="", compare=False)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name this namespace."""
        fields: Plain = [self.model, self.revision, self.dtype, self.quantization, self.shards, self.lora, self.cache_salt, self.hashing]
        tags: Plain = [list(tag) for tag in sorted(self.tags)]
        parts: Plain = ["kvhold-namespace-2", fields, tags, self.layout.fingerprint, self.facts.digest]
        return blake2b(canonical(parts), digest_size=NAMESPACE_BYTES).digest()

    @cached_property
    def description(self) -> bytes:
        """What it is made of, packed for `kvhold names`: no salt, no tenant, and no value that may be secret.

        Empty for a namespace without a model, which stands for its layout alone.
        """
        if not self.model:
            return b""
        layout = self.layout
        shown = {name: repr(getattr(self, name)) for name in ("model", "revision", "dtype", "quantization", "shards", "lora", "hashing")}
        shown |= {f"tag.{name}": repr(value) for name, value in self.tags if name != TENANT}
        shown |= {name: "set" for name, is_set in (("cache_salt", self.cache_salt), ("tenant", self.tenant)) if is_set}
        shown |= {f"layout.{name}": repr(getattr(layout, name)) for name in ("tokens_per_chunk", "tail_tokens")}
        for number, group in enumerate(layout.groups):
            shown |= {f"layout.groups[{number}].{f.name}": repr(getattr(group, f.name)) for f in fields(group)}
        return pack(self.title or self.model, shown | dict(self.facts.items))

    @property
    def tenant(self) -> str:
        """Whose KV it is: what the tag of that name says."""
        return dict(self.tags).get(TENANT, "")

    def narrowed(self, *, lora: str = "", cache_salt: str = "", tags: Sequence[tuple[str, str]] = ()) -> "Namespace":
        """This namespace for one request: its LoRA, and its salt and tags beside those that stand here already."""
        if not (lora or cache_salt or tags):
            return self
        if cache_salt and self.cache_salt:  # a request's salt narrows a tenant's, it does not replace it
            cache_salt = canonical([self.cache_salt, cache_salt]).hex()
        return replace(self, lora=lora or self.lora, cache_salt=cache_salt or self.cache_salt, tags=(*self.tags, *tags))

    def prompt(self, tokens: npt.ArrayLike, extras: Mapping[int, bytes] | None = None, *, inserts: Iterable[Insert] = ()) -> "Prompt":
        """Hash a prompt once. Raises ValueError, naming the field, for what are no tokens or no inserts of this prompt.

        tokens:  [n] integers, best an int32 array
        extras:  for some chunks, what else their KV depends on
        inserts: what in the prompt is no text, in any order; they must not overlap
        """
        checked = as_tokens(tokens)
        return Prompt(self, checked, extras or {}, as_inserts(inserts, len(checked)))


def as_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """`tokens` as a contiguous int32 array. Raises ValueError for anything but one axis of integers that fit 32 bits."""
    if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
        with suppress(TypeError, OverflowError):  # what is wrong with it is said below
            # Unsigned: three times as fast as signed, four times as fast as numpy, which looks at a list twice.
            numbers = array("I")
            numbers.fromlist(tokens)  # faster than giving it the list at once
            unsigned = np.frombuffer(numbers, np.uintc)
            if unsigned.max() <= np.iinfo(np.int32).max:
                found = unsigned.view(np.intc).astype("<i4", copy=False)
                found.flags.writeable = False  # so that it is hashed where it lies
                return found
    found = np.asarray(tokens)
    if found.size == 0:
        return np.empty(0, dtype="<i4")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"tokens must be one axis of integers, not {found.dtype} with shape {found.shape}")
    if found.dtype != np.dtype("<i4"):
        if found.max() > np.iinfo(np.int32).max or found.min() < np.iinfo(np.int32).min:
            raise ValueError("a token id does not fit 32 bits")
        found = found.astype("<i4")
    found = np.ascontiguousarray(found)
    is_somebodys = found.base is not None and not found.flags.writeable  # who may write to what it is a view of
    return found.copy() if is_somebodys else found


def as_inserts(inserts: Iterable[Insert], num_tokens: int) -> tuple[Insert, ...]:
    """`inserts` in the order of their places. Raises ValueError unless each lies inside `num_tokens` tokens and apart from the others."""
    checked = [(_as_insert(insert, f"inserts[{i}]", num_tokens), i) for i, insert in enumerate(inserts)]
    checked.sort(key=lambda pair: pair[0].start)
    for (before, i), (after, j) in pairwise(checked):
        if after.start < before.start + before.length:
            raise ValueError(f"inserts[{j}].start is {after.start}, inside inserts[{i}] at {_place(before)}; inserts must not overlap")
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
            raise ValueError(f"{name}.{name_of} is {value!r}; it must be a whole number of tokens") from None
        if isinstance(value, bool) or numbers[name_of] < least:
            raise ValueError(f"{name}.{name_of} is {value!r}; it must be {least} or more")
    digest: Any = insert.digest
    if not isinstance(digest, (bytes, str)) or not digest:
        raise ValueError(f"{name}.digest is {digest!r}; it must be the content's whole hash, as bytes or text, and not empty")
    whole = Insert(**numbers, digest=digest)
    if whole.start + whole.length > num_tokens:
        raise ValueError(f"{name}.length is {whole.length}: it reaches from {_place(whole)}, beyond the prompt's {num_tokens} tokens")
    return whole


def _place(insert: Insert) -> str:
    return f"{insert.start} to {insert.start + insert.length}"


class _Text(ABC):
    """What can be said of any text whose whole chunks are hashed, finished or growing."""

    namespace: Namespace

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens in all."""

    @abstractmethod
    def _hashes(self, first: int, last: int) -> bytes:
        """The hashes of the whole chunks `first` to before `last`, end to end."""

    @abstractmethod
    def _tail_hash(self, num_tokens: int) -> bytes:
        """The hash of the tail that takes the first `num_tokens` tokens after the last whole chunk."""

    @property
    def num_whole(self) -> int:
        """How many whole chunks it has."""
        return self.num_tokens // self.namespace.layout.tokens_per_chunk

    @property
    def tail_lengths(self) -> tuple[int, ...]:
        """How long in tokens a tail after the last whole chunk may be, shortest first: each block's end, or, where tails
        may end anywhere, the text's own end alone."""
        step = self.namespace.layout.tail_tokens
        rest = self.num_tokens % self.namespace.layout.tokens_per_chunk
        if step == 1:
            return (rest,) if rest else ()
        return tuple(range(step, rest + 1, step)) if step else ()

    @property
    def chain(self) -> bytes:
        """The hashes of the whole chunks, HASH_BYTES each, end to end."""
        return self._hashes(0, self.num_whole)

    @property
    def tails(self) -> bytes:
        """The hashes of the possible tails, HASH_BYTES each, end to end."""
        return b"".join(map(self._tail_hash, self.tail_lengths))

    def query(self) -> Query:
        """This text as a lookup asks for it."""
        space = self.namespace
        return Query(space.digest, space.layout.fingerprint, space.shards, self.chain, self.tails, self.tail_lengths, space.tenant)

    def chunks(self, first: int = 0, *, last: int | None = None, tail: bool = True) -> ChunkNames:
        """The whole chunks from number `first` to before `last` (default: all), and the longest tail after them, unless `tail` is false."""
        assert 0 <= first <= self.num_whole, "what begins after the last whole chunk is its tail"
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
        """The hash of whole chunk number `chunk`."""
        assert 0 <= chunk < self.num_whole, "not a whole chunk of this prompt"
        return self._hashes(chunk, chunk + 1)

    def chunk_key(self, chunk: int, group: int = 0, shard: int = 0) -> bytes:
        """The key of whole chunk number `chunk`."""
        return make_key(self.namespace.digest, self.hash_at(chunk), group, shard)


@dataclass(frozen=True, eq=False)
class Prompt(_Text):
    """The token hashes of one prompt in one namespace. Hashing is done on first use, one call a chunk.

    `inserts` are in order and apart; some may lie beyond the end of a prompt that was cut (`until`).
    """

    namespace: Namespace
    tokens: npt.NDArray[np.int32]
    extras: Mapping[int, bytes]
    inserts: tuple[Insert, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return len(self.tokens)

    @cached_property
    def chain(self) -> bytes:
        """The hashes of the whole chunks, HASH_BYTES each, end to end."""
        size = self.namespace.layout.tokens_per_chunk
        return b"".join(self._links(0, _NO_PARENT, self._raw[: 4 * size * self.num_whole], size))

    @cached_property
    def tails(self) -> bytes:
        """The hashes of the possible tails, HASH_BYTES each, end to end."""
        return super().tails

    def until(self, num_tokens: int) -> "Prompt":
        """The first `num_tokens` tokens of it. An insert that reaches beyond them is still named by its whole place."""
        assert 0 <= num_tokens <= self.num_tokens, "a prompt can only be cut"
        return replace(self, tokens=self.tokens[:num_tokens])

    def followed_by(self, tokens: npt.ArrayLike) -> "Prompt":
        """It and [n] integers after it, with its own extras and inserts. Raises ValueError for what are no tokens."""
        return replace(self, tokens=np.concatenate([self.tokens, as_tokens(tokens)]))

    def growing(self) -> "GrowingPrompt":
        """This prompt, to be continued. It stays as it is itself."""
        return GrowingPrompt(self)

    def _links(self, chunk: int, parent: bytes, raw: "memoryview | bytes", size: int) -> list[bytes]:
        """The hashes of the chunks of `size` tokens that lie end to end in `raw`; the first is number `chunk` and comes after `parent`."""
        header, step, links = size.to_bytes(4, "little"), 4 * size, []
        start, is_text = chunk * self.namespace.layout.tokens_per_chunk, not (self.inserts or self.extras)
        for at in range(0, len(raw), step):
            inserts = () if is_text else self._inserts_in(start, start + size)
            state = self._hash_with_inserts.copy() if inserts else self._hash.copy()
            state.update(parent + header)
            state.update(raw[at : at + step])
            if not is_text:
                extra = self.extras.get(chunk, b"")
                if inserts:
                    state.update(canonical([extra, [[insert.start, insert.length, insert.digest] for insert in inserts]]))
                elif extra:
                    state.update(extra)
                chunk, start = chunk + 1, start + size
            parent = state.digest()
            links.append(parent)
        return links

    @cached_property
    def _hash(self) -> blake2b:
        """Of no tokens yet: its copies take half the time of new ones."""
        return blake2b(digest_size=HASH_BYTES, salt=self.namespace.digest, person=_PERSON)

    @cached_property
    def _hash_with_inserts(self) -> blake2b:
        return blake2b(digest_size=HASH_BYTES, salt=self.namespace.digest, person=_PERSON_WITH_INSERTS)

    @cached_property
    def _raw(self) -> memoryview:
        """The tokens' bytes as they are now: a copy, where somebody may write to them."""
        return memoryview(self.tokens.tobytes()) if self.tokens.flags.writeable else self.tokens.view(np.uint8).data

    @cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        """Where inserts begin and where they end, both ascending, because they are apart."""
        return [insert.start for insert in self.inserts], [insert.start + insert.length for insert in self.inserts]

    def _inserts_in(self, start: int, end: int) -> tuple[Insert, ...]:
        """The inserts of which some token lies at `start` or after it and before `end`."""
        begins, ends = self._edges
        return self.inserts[bisect_right(ends, start) : bisect_left(begins, end)]

    def _hashes(self, first: int, last: int) -> bytes:
        return self.chain[first * HASH_BYTES : last * HASH_BYTES]

    def _tail_hash(self, num_tokens: int) -> bytes:
        first = 4 * self.num_whole * self.namespace.layout.tokens_per_chunk
        parent = self.chain[-HASH_BYTES:] or _NO_PARENT
        return self._links(self.num_whole, parent, self._raw[first : first + 4 * num_tokens], num_tokens)[0]


class GrowingPrompt(_Text):
    """A prompt and the tokens that follow it, hashed as they come: n more cost O(n), however many there are already.

    Its keys are those of a prompt of all its tokens, with the extras and inserts that the prompt was made with.
    Not for two threads at once; what it has given (`chunks`, `query`) does not change with it.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.namespace = prompt.namespace
        self._prompt = prompt
        self._hashed = bytearray(prompt.chain)
        self._rest = bytearray(prompt.tokens[prompt.num_whole * self.namespace.layout.tokens_per_chunk :].tobytes())

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return len(self._hashed) // HASH_BYTES * self.namespace.layout.tokens_per_chunk + len(self._rest) // 4

    def append(self, tokens: npt.ArrayLike) -> None:
        """[n] integers follow. Raises ValueError, and changes nothing, for what are no tokens."""
        self._rest += as_tokens(tokens).tobytes()
        size = self.namespace.layout.tokens_per_chunk
        whole = len(self._rest) // (4 * size) * 4 * size
        if whole:
            links = self._prompt._links(len(self._hashed) // HASH_BYTES, self._parent, bytes(self._rest[:whole]), size)
            self._hashed += b"".join(links)
            del self._rest[:whole]

    @property
    def _parent(self) -> bytes:
        return bytes(self._hashed[-HASH_BYTES:]) or _NO_PARENT

    def _hashes(self, first: int, last: int) -> bytes:
        return bytes(self._hashed[first * HASH_BYTES : last * HASH_BYTES])

    def _tail_hash(self, num_tokens: int) -> bytes:
        return self._prompt._links(self.num_whole, self._parent, bytes(self._rest[: 4 * num_tokens]), num_tokens)[0]


def make_key(namespace: bytes, chain_hash: bytes, group: int, shard: int) -> bytes:
    """KEY_BYTES: namespace, hash, group and shard (2 bytes each, little-endian)."""
    return namespace + chain_hash + place_suffix(group, shard)


def split_hashes(hashes: bytes) -> Iterator[bytes]:
    """The hashes that lie end to end."""
    return map(itemgetter(0), _ONE_HASH.iter_unpack(hashes))


def place_suffix(group: int, shard: int) -> bytes:
    """The last 4 bytes of a key: group and shard."""
    assert 0 <= group <= 0xFFFF and 0 <= shard <= 0xFFFF
    return (group | shard << 16).to_bytes(4, "little")


@dataclass(frozen=True)
class KeyParts:
    """A key taken apart, for logs and tools."""

    namespace: bytes
    hash: bytes
    group: int
    shard: int


def split_key(key: bytes) -> KeyParts:
    """The parts of `key`. Raises ValueError unless it is KEY_BYTES long."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this has {len(key)}")
    place = int.from_bytes(key[-4:], "little")
    middle = NAMESPACE_BYTES + HASH_BYTES
    return KeyParts(key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:middle], place & 0xFFFF, place >> 16)


def extra_bytes(value: Any) -> bytes:
    """What else a chunk's KV depends on (an image's hash, an adapter), as unambiguous bytes for `extras`."""
    return canonical(value)
