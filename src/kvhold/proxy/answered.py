"""Prompts that decode engines have answered lately, so that the next one needs no prefill part.

A guess: their KV may be gone, and then the decode engine computes it. No I/O.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from itertools import takewhile

from kvhold.proxy.prompts import Inference

_PIECE_BYTES = 512
_MOST_PIECES = 4_096  # of a prompt
_MOST_HELD = 1 << 16
_DIGEST_BYTES = 16


class AnsweredPrompts:
    """Beginnings of prompts, as bytes of their JSON. keep_s: 0: none is remembered"""

    def __init__(self, keep_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._now = now
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def new_tokens(self, inference: Inference) -> int | None:
        """Likely number of tokens after the longest answered beginning; None: there is none."""
        if not self._keep_s or inference.num_prompts != 1:
            return None
        now = self._now()
        pieces, size = _pieces(inference)
        known = sum(1 for _ in takewhile(lambda one: self._until.get(one, 0.0) > now, pieces))
        if not known:
            return None
        known_bytes = min(known * _PIECE_BYTES, size)
        return inference.likely_tokens * (size - known_bytes) // size

    def add(self, inference: Inference) -> None:
        if not self._keep_s or inference.num_prompts != 1:
            return
        until = self._now() + self._keep_s
        for piece in _pieces(inference)[0]:
            self._until[piece] = until
            self._until.move_to_end(piece)
        while len(self._until) > _MOST_HELD:
            self._until.popitem(last=False)


def _pieces(inference: Inference) -> tuple[list[bytes], int]:
    """Return a digest for each piece with all before it, and the prompt's bytes."""
    parts = inference.prompt_bytes()
    text = parts[-1]
    chain = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts[:-1]:
        chain.update(len(part).to_bytes(8, "little"))
        chain.update(part)
    digests = []
    most = min(len(text), _MOST_PIECES * _PIECE_BYTES)
    for start in range(0, most, _PIECE_BYTES):
        chain.update(text[start : start + _PIECE_BYTES])
        digests.append(chain.digest())
    return digests, len(text)
