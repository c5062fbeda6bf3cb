"""Blocks of one chunk that recur at any offset, without marks.

    for block in blocks(prompt, span):       # each stored as a prompt
        fingerprints.add(block)
    spans = fingerprints.find(prompt)        # for `cache.spans`

Finds only what this process has added.
"""

import threading
from collections import OrderedDict
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.blend.spans import Span, span_prompt
from kvhold.cache.query_limits import MOST_SPANS
from kvhold.core.keys import Prompt

_Words: TypeAlias = npt.NDArray[np.uint64]

_BASE = 0x9E37_79B9_7F4A_7C15  # odd, so it has an inverse
_INVERSE = pow(_BASE, -1, 1 << 64)
_TABLE_BITS = 20
_MORE_CHECKS = 16


def blocks(prompt: Prompt, span: Span) -> list[Prompt]:
    """The whole chunks of a span, each a prompt. Raises ValueError."""
    size = prompt.namespace.layout.tokens_per_chunk
    return [
        span_prompt(prompt, Span(start, start + size))
        for start in range(span.start, span.end - size + 1, size)
    ]


class Fingerprints:
    """Any thread. Memory: 2 MiB, and 170 bytes per block."""

    def __init__(self, max_blocks: int = 65_536) -> None:
        """max_blocks: the least recently used are dropped"""
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[int, bytes] = OrderedDict()  # by fingerprint
        self._counts = np.zeros(1 << _TABLE_BITS, np.uint16)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, block: Prompt) -> None:
        """Raises ValueError unless it is one chunk."""
        size = block.namespace.layout.tokens_per_chunk
        if block.num_tokens != size:
            raise ValueError(f"a block has {block.num_tokens} tokens; it must have {size}")
        found = _fingerprints(block, size)
        fingerprint, place = int(found[0]), int(_places(found)[0])
        with self._lock:
            if fingerprint not in self._hashes:
                self._counts[place] += 1
            self._hashes[fingerprint] = block.chain
            self._hashes.move_to_end(fingerprint)
            if len(self._hashes) > self._max_blocks:
                oldest, _ = self._hashes.popitem(last=False)
                self._counts[_places(np.array([oldest], np.uint64))] -= 1

    def find(self, prompt: Prompt) -> tuple[Span, ...]:
        """Known blocks, from the left, without overlap, at most 256.

        Verified by at most 16 strong hashes, and two per chunk of the prompt.
        """
        size, spans, end = prompt.namespace.layout.tokens_per_chunk, list[Span](), 0
        checks = 2 * (prompt.num_tokens // size) + _MORE_CHECKS
        found = _fingerprints(prompt, size)
        may_be = np.flatnonzero(self._counts[_places(found)])
        for start, fingerprint in zip(may_be.tolist(), found[may_be].tolist(), strict=True):
            if start < end or (known := self._hashes.get(fingerprint)) is None:
                continue
            if not checks or len(spans) == MOST_SPANS:
                break
            checks -= 1
            if _hash_at(prompt, start, size) == known:
                end = start + size
                spans.append(Span(start, end))
                with self._lock:
                    if fingerprint in self._hashes:
                        self._hashes.move_to_end(fingerprint)
        return tuple(spans)


def _hash_at(prompt: Prompt, start: int, size: int) -> bytes:
    try:
        return span_prompt(prompt, Span(start, start + size)).chain
    except ValueError:
        return b""


def _fingerprints(prompt: Prompt, size: int) -> _Words:
    """At each offset: a polynomial of the chunk's tokens, modulo 2**64."""
    num_tokens = prompt.num_tokens
    if num_tokens < size:
        return np.empty(0, np.uint64)
    words = _mixed(prompt.tokens.astype(np.uint64), prompt.namespace.of_spans.digest)
    sums = np.zeros(num_tokens + 1, np.uint64)
    np.cumsum(words * _powers(_BASE, num_tokens), out=sums[1:])
    return (sums[size:] - sums[:-size]) * _powers(_INVERSE, num_tokens - size + 1)


def _mixed(values: _Words, key: bytes) -> _Words:
    values = values + np.frombuffer(key, np.uint64)[:1]
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ values >> np.uint64(31)


def _powers(base: int, count: int) -> _Words:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _places(fingerprints: _Words) -> npt.NDArray[np.int64]:
    return (fingerprints >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
