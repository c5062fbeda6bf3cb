"""Describe the chunks of requests to a node that publishes events for routers.

A fault costs events, never a request. All but the calls' first lines runs on the lookup thread.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import msgspec

from kvhold.core.errors import KVHoldError
from kvhold.core.keys import HASH_BYTES, ChunkNames, Prompt
from kvhold.core.router_events import ChunkDescription
from kvhold.integrations.vllm.events import Describer, first_chunks
from kvhold.node import NodeClient

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_AT_ONCE = 64
_encoder = msgspec.msgpack.Encoder()


class Descriptions:
    def __init__(
        self, cache: NodeClient, thread: Executor, make_describer: Callable[[], Describer]
    ) -> None:
        self._cache = cache
        self._thread = thread
        self._make_describer = make_describer
        self._describer: Describer | None = None

    def stored(self, request: "Request", names: ChunkNames) -> None:
        if self._cache.publishes_events:
            self._thread.submit(self._describe, request, lambda: names)

    def found(self, request: "Request", prompt: Prompt, num_tokens: int) -> None:
        if num_tokens and self._cache.publishes_events:
            self._thread.submit(self._describe, request, lambda: first_chunks(prompt, num_tokens))

    def _describe(self, request: "Request", make_names: Callable[[], ChunkNames]) -> None:
        try:
            if self._describer is None:
                self._describer = self._make_describer()
            self._send(self._describer, request, make_names())
        except KVHoldError as error:
            log.debug("kvhold: no events for routers about %s: %s", request.request_id, error)
        except Exception:
            log.exception("kvhold: no events for routers about request %s", request.request_id)

    def _send(self, describer: Describer, request: "Request", names: ChunkNames) -> None:
        joined = [
            names.namespace + names.hashes[at : at + HASH_BYTES]
            for at in range(0, len(names.hashes), HASH_BYTES)
        ]
        wanted = {joined[at] for at in self._cache.undescribed(b"".join(joined))}
        if not wanted:
            return
        chunks = [
            ChunkDescription(
                name,
                described.first_token,
                describer.shards,
                [None if one is None else _encoder.encode(one) for one in described.stored],
            )
            for name, described in describer.describe(request, names, wanted.__contains__)
        ]
        for first in range(0, len(chunks), _AT_ONCE):
            self._cache.describe(chunks[first : first + _AT_ONCE])
