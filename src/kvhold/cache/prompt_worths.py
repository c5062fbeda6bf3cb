from collections.abc import Callable
from typing import NamedTuple

from kvhold.cache.busiest import Busiest, Decay
from kvhold.cache.chores import Turns
from kvhold.cache.index.hits import needed_chunks
from kvhold.cache.index.presence import first_group
from kvhold.core.keys import HASH_BYTES, Query, place_suffix
from kvhold.core.layout import Layout
from kvhold.core.usage import PromptWorth
from kvhold.tiers.ram import RamTier

MOST_KEPT, MOST_SHOWN = 512, 50
_SAMPLES = 16


class _Name(NamedTuple):
    """end: hash of the hit's last chunk, or a session"""

    namespace: bytes
    end: bytes
    session: str


class _Prompt:
    __slots__ = (
        "end",
        "hashes",
        "hit_tokens",
        "hits",
        "layout",
        "num_tokens",
        "saved_tokens",
        "shard",
        "shards",
    )

    def __init__(self) -> None:
        self.end = b""
        self.hashes: list[bytes] = []
        self.layout: Layout | None = None
        self.shard = self.shards = self.num_tokens = 0
        self.hits = self.hit_tokens = self.saved_tokens = 0

    def note_chunks(self, query: Query, layout: Layout, num_tokens: int, end: bytes) -> None:
        self.end, self.layout = end, layout
        self.shards, self.num_tokens = query.num_shards, num_tokens
        self.shard = query.shard_numbers[0]
        whole = num_tokens // layout.tokens_per_chunk
        samples = min(_SAMPLES, whole)
        ends = [(at + 1) * whole // samples * HASH_BYTES for at in range(samples)]
        self.hashes = [query.hashes[at - HASH_BYTES : at] for at in ends] or [end]

    def keys(self, namespace: bytes) -> list[bytes]:
        assert self.layout is not None, "noted"
        suffix = place_suffix(first_group(self.layout), self.shard)
        return [namespace + one + suffix for one in self.hashes]

    @property
    def nbytes(self) -> int:
        assert self.layout is not None, "noted"
        size = self.layout.tokens_per_chunk
        return self.shards * sum(
            len(needed_chunks(self.layout, group, self.num_tokens))
            * self.layout.chunk_bytes(group, size)
            for group in range(len(self.layout.groups))
        )


class PromptWorths:
    def __init__(self, ram: RamTier, decay: Decay) -> None:
        self._ram = ram
        self._decay = decay
        self._prompts = Busiest[_Name, _Prompt](MOST_KEPT, _Prompt, decay)

    def __len__(self) -> int:
        return len(self._prompts)

    def count(
        self, query: Query, layout: Layout, session: str, hit_tokens: int, saved_tokens: int
    ) -> None:
        """hit_tokens: above 0"""
        end = _end_of(query, layout, hit_tokens)
        name = _Name(query.namespace, b"" if session else end, session)
        prompt = self._prompts.use(name, hit_tokens * self._decay.scale())
        prompt.hits += 1
        prompt.hit_tokens += hit_tokens
        prompt.saved_tokens += saved_tokens
        if prompt.end != end:
            prompt.note_chunks(query, layout, hit_tokens, end)

    def worths_turns(
        self,
        token_s: Callable[[str], float | None],
        tenant_of: Callable[[bytes], str | None],
        tenant: str,
    ) -> Turns[list[PromptWorth]]:
        worths: list[PromptWorth] = []
        for name, prompt in self._prompts.rows():
            owner = tenant_of(name.namespace) or ""
            if tenant and owner != tenant:
                continue
            worths.append(self._worth(name, prompt, token_s(name.namespace.hex()), owner))
            if len(worths) == MOST_SHOWN:
                break
            yield _SAMPLES
        return sorted(worths, key=lambda worth: (-(worth.saved_s or 0.0), -worth.hit_tokens))

    def _worth(
        self, name: _Name, prompt: _Prompt, token_s: float | None, tenant: str
    ) -> PromptWorth:
        keys = prompt.keys(name.namespace)
        found = [entry for key in keys if (entry := self._ram.find(key)) is not None]
        nbytes = prompt.nbytes
        return PromptWorth(
            namespace=name.namespace.hex(),
            prompt=prompt.end.hex(),
            tenant=tenant,
            session=name.session,
            num_tokens=prompt.num_tokens,
            nbytes=nbytes,
            held_bytes=nbytes * len(found) // len(keys),
            hits=prompt.hits,
            hit_tokens=prompt.hit_tokens,
            saved_s=None if token_s is None else prompt.saved_tokens * token_s,
            pinned=bool(found) and all(entry.pins for entry in found),
        )


def _end_of(query: Query, layout: Layout, num_tokens: int) -> bytes:
    """Tails after whole chunks do not count: they come and go."""
    whole = num_tokens // layout.tokens_per_chunk
    if whole:
        return query.hashes[(whole - 1) * HASH_BYTES : whole * HASH_BYTES]
    tail = query.tail_lengths.index(num_tokens)
    return query.tail_hashes[tail * HASH_BYTES : (tail + 1) * HASH_BYTES]
