"""Names of chunks: the same bytes in every process and on every host.

    namespace = Namespace(model="llama", layout=layout)
    prompt = namespace.prompt(tokens)            # the keys of a prompt, hashed once
    prompt.chunk_key(0)                          # 40 bytes

A chunk's key is its namespace's digest, the chained hash of all tokens up to the chunk's end, the group and the shard. The chain is
blake2b (RFC 7693) with the namespace as salt: h[i] = H(h[i-1], number of tokens, tokens of chunk i, extra of chunk i). It is keyed, so
nobody guesses another namespace's keys from the same text, and 160 bits wide, so nobody makes two texts meet. A token is hashed as
int32, little-endian. Pure functions; any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvhold.core.encoding import Plain, canonical
from kvhold.core.layout import Layout

NAMESPACE_BYTES = 16
HASH_BYTES = 20
KEY_BYTES = NAMESPACE_BYTES + HASH_BYTES + 4

_PERSON = b"kvhold-chunk-1"


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
    """

    namespace: bytes
    layout: bytes
    shards: int
    hashes: bytes
    tail_hashes: bytes = b""
    tail_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal for KV to be reusable. Two namespaces that differ in any field share no key.

    shards:     into how many parts the model's KV is split (tensor times pipeline parallel ranks that hold different KV)
    cache_salt: a tenant's secret or any text that separates callers
    tags:       pairs of names and values that must match, in any order
    hashing:    what the token hashes are made from; engines with hashes of their own name them here
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

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name this namespace."""
        fields: Plain = [self.model, self.revision, self.dtype, self.quantization, self.shards, self.lora, self.cache_salt, self.hashing]
        tags: Plain = [list(tag) for tag in sorted(self.tags)]
        return blake2b(canonical(["kvhold-namespace-1", fields, tags, self.layout.fingerprint]), digest_size=NAMESPACE_BYTES).digest()

    def narrowed(self, *, lora: str = "", cache_salt: str = "", tags: Sequence[tuple[str, str]] = ()) -> "Namespace":
        """This namespace for one request: its LoRA, and its salt and tags beside those that stand here already."""
        if not (lora or cache_salt or tags):
            return self
        if cache_salt and self.cache_salt:  # a request's salt narrows a tenant's, it does not replace it
            cache_salt = canonical([self.cache_salt, cache_salt]).hex()
        return replace(self, lora=lora or self.lora, cache_salt=cache_salt or self.cache_salt, tags=(*self.tags, *tags))

    def prompt(self, tokens: npt.ArrayLike, extras: Mapping[int, bytes] | None = None) -> "Prompt":
        """Hash a prompt once. `tokens`: [n] integers, best an int32 array; `extras`: for some chunks, what else their KV depends on."""
        return Prompt(self, as_tokens(tokens), extras or {})


def as_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """`tokens` as a contiguous int32 array. Raises ValueError for anything but one axis of integers that fit 32 bits."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype="<i4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be one axis of integers, not {array.dtype} with shape {array.shape}")
    if array.dtype != np.dtype("<i4"):
        if array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min:
            raise ValueError("a token id does not fit 32 bits")
        array = array.astype("<i4")
    return np.ascontiguousarray(array)


@dataclass(frozen=True, eq=False)
class Prompt:
    """The token hashes of one prompt in one namespace. Hashing is done on first use, one call a chunk."""

    namespace: Namespace
    tokens: npt.NDArray[np.int32]
    extras: Mapping[int, bytes]

    @property
    def num_whole(self) -> int:
        """How many whole chunks the prompt has."""
        return len(self.tokens) // self.namespace.layout.tokens_per_chunk

    @cached_property
    def _raw(self) -> memoryview:
        return memoryview(self.tokens.tobytes())

    @cached_property
    def chain(self) -> bytes:
        """The hashes of the whole chunks, HASH_BYTES each, end to end."""
        size = self.namespace.layout.tokens_per_chunk
        raw = self._raw
        header, step, salt = size.to_bytes(4, "little"), 4 * size, self.namespace.digest
        extras, parent, chain = self.extras, bytes(HASH_BYTES), []
        for start in range(0, self.num_whole * step, step):
            state = blake2b(parent + header, digest_size=HASH_BYTES, salt=salt, person=_PERSON)
            state.update(raw[start : start + step])
            if extras and (extra := extras.get(start // step)):
                state.update(extra)
            parent = state.digest()
            chain.append(parent)
        return b"".join(chain)

    @cached_property
    def tail_lengths(self) -> tuple[int, ...]:
        """How long in tokens a tail after the last whole chunk may be, shortest first: each block's end, or, where tails
        may end anywhere, the prompt's own end alone."""
        step = self.namespace.layout.tail_tokens
        rest = len(self.tokens) - self.num_whole * self.namespace.layout.tokens_per_chunk
        if step == 1:
            return (rest,) if rest else ()
        return tuple(range(step, rest + 1, step)) if step else ()

    @cached_property
    def tails(self) -> bytes:
        """The hashes of those tails, HASH_BYTES each, end to end."""
        return b"".join(map(self._tail_hash, self.tail_lengths))

    def query(self) -> Query:
        """This prompt as a lookup asks for it."""
        space = self.namespace
        return Query(space.digest, space.layout.fingerprint, space.shards, self.chain, self.tails, self.tail_lengths)

    def chunks(self, first: int = 0, *, last: int | None = None, tail: bool = True) -> ChunkNames:
        """The whole chunks from number `first` to before `last` (default: all), and the longest tail after them, unless `tail` is false."""
        assert 0 <= first <= self.num_whole, "what begins after the last whole chunk is its tail"
        hashes = self.chain[first * HASH_BYTES : self.num_whole * HASH_BYTES if last is None else last * HASH_BYTES]
        first_token = first * self.namespace.layout.tokens_per_chunk
        parent = self.hash_at(first - 1) if first else b""
        if tail and self.tail_lengths:
            assert last in (None, self.num_whole), "a tail follows the last whole chunk"
            return ChunkNames(self.namespace.digest, hashes + self.tails[-HASH_BYTES:], self.tail_lengths[-1], first_token, parent)
        return ChunkNames(self.namespace.digest, hashes, 0, first_token, parent)

    def hash_at(self, chunk: int) -> bytes:
        """The hash of whole chunk number `chunk`."""
        assert 0 <= chunk < self.num_whole, "not a whole chunk of this prompt"
        return self.chain[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]

    def chunk_key(self, chunk: int, group: int = 0, shard: int = 0) -> bytes:
        """The key of whole chunk number `chunk`."""
        return make_key(self.namespace.digest, self.hash_at(chunk), group, shard)

    def _tail_hash(self, num_tokens: int) -> bytes:
        first = self.num_whole * self.namespace.layout.tokens_per_chunk
        parent = self.hash_at(self.num_whole - 1) if self.num_whole else bytes(HASH_BYTES)
        raw = self._raw[4 * first : 4 * (first + num_tokens)]
        header = num_tokens.to_bytes(4, "little")
        state = blake2b(parent + header, digest_size=HASH_BYTES, salt=self.namespace.digest, person=_PERSON)
        state.update(raw)
        state.update(self.extras.get(self.num_whole, b""))
        return state.digest()


def make_key(namespace: bytes, chain_hash: bytes, group: int, shard: int) -> bytes:
    """KEY_BYTES: namespace, hash, group and shard (2 bytes each, little-endian)."""
    return namespace + chain_hash + place_suffix(group, shard)


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
