"""Identify a prompt's images, video and audio by a hash of their content.

vLLM's caches use an identifier that a client may choose. After two contents of one, its later
requests are not stored: vLLM may mix their KV. Content that vLLM leaves out is that of the same
identifier in this process.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvhold.core.keys import Insert

if TYPE_CHECKING:
    from vllm.v1.request import Request

_REMEMBERED = 200_000  # identifiers; vLLM forgets their KV earlier
_SEVERAL = b""
_IN_SHARED_MEMORY = {"address", "signature"}


class MediaError(Exception): ...


class Media:
    """The contents that this engine has seen, by identifier. Any thread.

    `announce` each request when it arrives. Then call `inserts_of` once, in the same order.
    """

    def __init__(self, *, embeddings_may_be_missing: bool = False) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._announced: Counter[bytes] = Counter()
        self._may_be_missing = embeddings_may_be_missing

    def announce(self, request: "Request") -> None:
        if request.mm_features:
            with self._lock:
                self._announced.update(_key(feature) for feature in request.mm_features)

    def is_certain(self, request: "Request") -> bool:
        """Each identifier stands for one content, also in waiting requests."""
        with self._lock:
            return all(
                not self._announced[key] and self._known.get(key, _SEVERAL) != _SEVERAL
                for key in map(_key, request.mm_features)
            )

    def inserts_of(self, request: "Request") -> list[Insert]:
        """One per content.

        Raises MediaError: unidentified content; TypeError: unknown types.
        """
        refusal: Exception | None = None
        inserts = []
        for feature in request.mm_features:  # vLLM caches all, even after a refusal
            try:
                digest = self._digest(feature)
            except (MediaError, TypeError) as error:
                refusal = refusal or error
            else:
                place = feature.mm_position
                inserts.append(Insert(place.offset, place.length, digest))
            finally:
                self._read(_key(feature))
        if request.mm_features and self._may_be_missing:
            raise MediaError(
                "embeddings of its images, video or audio may come from elsewhere "
                "(allow_missing_mm_embeddings)"
            )
        if refusal is not None:
            raise refusal
        return inserts

    def _digest(self, feature: Any) -> bytes:
        if feature.data is None:
            with self._lock:
                known = self._known.get(_key(feature))
            if known is None:
                raise MediaError(
                    "the request leaves out the content of an image, video or audio that was "
                    "not seen here before"
                )
            content = self._note(_key(feature), known)
        else:
            content = _SEVERAL
            try:
                content = _content_of(feature)
            finally:
                content = self._note(_key(feature), content)
        if content == _SEVERAL:
            raise MediaError(
                "the identifier of an image, video or audio has stood for several contents"
            )
        state = blake2b(content, digest_size=32)
        _feed(state, feature.mm_position.is_embed)
        return state.digest()

    def _read(self, key: bytes) -> None:
        with self._lock:
            if self._announced[key] > 1:
                self._announced[key] -= 1
            else:
                del self._announced[key]

    def _note(self, key: bytes, content: bytes) -> bytes:
        with self._lock:
            if self._known.get(key, content) != content:
                content = _SEVERAL
            self._known[key] = content
            self._known.move_to_end(key)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return content


def _key(feature: Any) -> bytes:
    return blake2b(feature.identifier.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _content_of(feature: Any) -> bytes:
    if _IN_SHARED_MEMORY <= feature.data.keys():
        raise MediaError(
            "images, video and audio come through shared memory, which only vLLM can read "
            "(mm_processor_cache_type is shm; lru can be cached)"
        )
    parts = {name: element.data for name, element in feature.data.items()}
    if not parts or any(part is None for part in parts.values()):
        raise MediaError("a part of an image's, video's or audio's content is missing")
    state = blake2b(feature.modality.encode(), digest_size=32)
    _feed(state, parts)
    return state.digest()


def _feed(state: Any, value: Any) -> None:
    """Other content, shape, type or order gives other bytes."""
    match value:
        case torch.Tensor():
            flat = (
                value.detach().cpu().contiguous().view(-1)
                if value.ndim
                else value.detach().cpu().reshape(1)
            )
            _say(state, "tensor", str(value.dtype), str(tuple(value.shape)))
            state.update(flat.view(torch.uint8).numpy().data)
        case np.ndarray() if value.dtype.kind in "biufc":
            _say(state, "array", value.dtype.str, str(value.shape))
            state.update(np.ascontiguousarray(value).data)
        case Mapping():
            _say(state, "mapping", str(len(value)))
            for name in sorted(value):
                _say(state, str(name))
                _feed(state, value[name])
        case list() | tuple():
            _say(state, "list", str(len(value)))
            for item in value:
                _feed(state, item)
        case None | bool() | int() | float() | str():
            _say(state, type(value).__name__, repr(value))
        case _:
            raise TypeError(f"content of type {type(value).__name__}")


def _say(state: Any, *words: str) -> None:
    for word in words:
        encoded = word.encode()
        state.update(len(encoded).to_bytes(8, "little") + encoded)
