"""An engine whose KV are hashes of tokens, and whose answers are hashes of KV."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvhold.core.config import ClientConfig
from kvhold.core.errors import DamagedChunks, KVHoldError
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient

VOCABULARY = 50_000
SPACE = Namespace(
    model="hashes",
    layout=Layout(
        groups=(Group(layers=2, planes=2, heads=2, head_dim=64, dtype="bfloat16"),),
        tokens_per_chunk=16,
    ),
)
_SHAPE = (2, 2, 32)  # layers, planes, words of a token
_CONSTANTS = np.random.default_rng(0).integers(1, 1 << 63, _SHAPE, dtype=np.uint64) | 1
_CONSTANTS[0, 0, 0] = 1  # this word is the state
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ANSWER_TOKENS = 4
_NOTHING = np.empty((*_SHAPE[:2], 0, _SHAPE[2]), np.uint64)

Tokens = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


def compute_kv(tokens: Tokens, before: Words | None = None) -> Words:
    """[layers, planes, tokens, words]"""
    first = 0 if before is None else before.shape[2]
    state = np.uint64(0) if before is None or not first else before[0, 0, -1, 0]
    mixed = (tokens.astype(np.uint64) + np.arange(first, first + len(tokens), dtype=np.uint64)) + 1
    mixed *= _GOLDEN
    mixed ^= mixed >> np.uint64(29)
    mixed *= _GOLDEN
    states = np.cumsum(mixed, dtype=np.uint64) + state
    kv: Words = states[None, None, :, None] * _CONSTANTS[:, :, None, :]
    return kv


def answer(kv: Words) -> list[int]:
    weights = 2 * np.arange(kv.shape[2], dtype=np.uint64) + 1
    attended = np.einsum("lptw,t->lpw", kv, weights)
    last, tokens = kv, []
    for _ in range(_ANSWER_TOKENS):
        tokens.append(xxh3_64_intdigest(attended.tobytes()) % VOCABULARY)
        last = compute_kv(np.array(tokens[-1:], np.int32), last[:, :, -1:])
        attended = attended + last[:, :, 0] * np.uint64(2 * (kv.shape[2] + len(tokens)) - 1)
    return tokens


@dataclass
class ServedPrompt:
    tokens: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    peer_tokens: int = 0
    stored_tokens: int = 0
    wrong_bytes: int = 0
    damaged: str = ""
    calls: int = 0
    late: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class HashEngine:
    def __init__(self, client: NodeClient, config: ClientConfig, allowed_s: float) -> None:
        """allowed_s: beyond a deadline"""
        self._client = client
        self._call_s = config.call_timeout_s + allowed_s
        # a poll after the wait, and settling
        self._lookup_s = 3 * config.call_timeout_s + config.arrival_timeout_s + allowed_s

    def serve(self, tokens: Tokens, expected: Words) -> ServedPrompt:
        """expected: KV computed without a cache"""
        served, prompt = ServedPrompt(), SPACE.prompt(tokens)
        kv = _NOTHING
        with _noting_refusals(served):
            kv = self._load(prompt, served)
        served.hit_tokens = kv.shape[2]
        own = expected[:, :, : served.hit_tokens]
        served.wrong_bytes = int(np.count_nonzero(kv.view(np.uint8) != own.view(np.uint8)))

        kv = np.concatenate([kv, compute_kv(tokens[served.hit_tokens :], kv)], axis=2)
        with _noting_refusals(served):
            self._store(prompt, kv, served)
        served.tokens = answer(kv)
        return served

    def find(self, tokens: Tokens) -> int:
        try:
            with self._client.lookup(SPACE.prompt(tokens).query()) as hit:
                return hit.num_tokens
        except KVHoldError:
            return 0

    def _load(self, prompt: Prompt, served: ServedPrompt) -> Words:
        with _timed(served, "lookup", self._lookup_s):
            hit = self._client.lookup(prompt.query())
        with hit:
            if not hit.num_tokens:
                return _NOTHING
            with _timed(served, "claim", self._call_s):
                lease = self._client.claim(hit.ticket)
            if lease is None:
                return _NOTHING
            with lease:
                lease.verify(SPACE.layout)
                places = lease.chunks()
                parts = [
                    _words(lease.buffer, int(at), int(num_tokens))
                    for at, num_tokens in zip(places.offsets, places.num_tokens, strict=True)
                ]
                kv = np.concatenate(parts, axis=2)
            served.peer_tokens = sum(n for tier, n in hit.sources.items() if tier != "ram")
        return kv

    def _store(self, prompt: Prompt, kv: Words, served: ServedPrompt) -> None:
        first = min(served.hit_tokens // SPACE.layout.tokens_per_chunk, prompt.num_whole)
        names = prompt.chunks(first)
        if not len(names):
            return
        with _timed(served, "reserve", self._call_s):
            reservation = self._client.reserve(SPACE.layout, names)
        with reservation:
            places, start = reservation.chunks(), first * SPACE.layout.tokens_per_chunk
            for at, num_tokens in zip(places.offsets, places.num_tokens, strict=True):
                if at != ABSENT:
                    part = kv[:, :, start : start + int(num_tokens)]
                    _words(reservation.buffer, int(at), int(num_tokens))[...] = part
                    served.stored_tokens += int(num_tokens)
                start += int(num_tokens)
            with _timed(served, "commit", self._call_s):
                reservation.commit()


@contextmanager
def _timed(served: ServedPrompt, call: str, limit_s: float) -> Iterator[None]:
    served.calls += 1
    began_s = time.monotonic()
    try:
        yield
    finally:
        excess_s = time.monotonic() - began_s - limit_s
        if excess_s > 0:
            served.late.append(f"{call}: {excess_s:.2f} s")


@contextmanager
def _noting_refusals(served: ServedPrompt) -> Iterator[None]:
    try:
        yield
    except DamagedChunks as error:
        served.damaged = str(error)
    except KVHoldError as error:
        served.refused.append(str(error))


def _words(buffer: npt.NDArray[np.uint8], at: int, num_tokens: int) -> Words:
    layers, planes, words = _SHAPE
    nbytes = layers * planes * num_tokens * words * 8
    return buffer[at : at + nbytes].view(np.uint64).reshape(layers, planes, num_tokens, words)
