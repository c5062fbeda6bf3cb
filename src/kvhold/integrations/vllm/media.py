"""Identify a prompt's images, video and audio by a hash of their content.

Two users may choose the same identifier, so the content is hashed whole. vLLM leaves out content
that this process has had under the same identifier; then the earlier hash counts.
"""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvhold.core.keys import Insert

if TYPE_CHECKING:
    from vllm.v1.request import Request

_REMEMBERED = 10_000


class MediaError(Exception):
    """Content that cannot be identified; the text says why."""


class Media:
    def __init__(self, *, embeddings_may_be_missing: bool = False) -> None:
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._may_be_missing = embeddings_may_be_missing

    def inserts_of(self, request: "Request") -> list[Insert]:
        """Return one insert for each content. One thread.

        Raises MediaError if one cannot be identified, TypeError for unknown types.
        """
        if request.mm_features and self._may_be_missing:
            raise MediaError(
                "embeddings of its images, video or audio may come from elsewhere "
                "(allow_missing_mm_embeddings)"
            )
        return [
            Insert(f.mm_position.offset, f.mm_position.length, self._digest(f))
            for f in request.mm_features
        ]

    def _digest(self, feature: Any) -> bytes:
        if feature.data is None:
            digest = self._known.get(feature.identifier)
            if digest is None:
                raise MediaError(
                    "the content of an image, video or audio was left out of the request, "
                    "and was not seen here before"
                )
            self._known.move_to_end(feature.identifier)
            return digest
        parts = {name: element.data for name, element in feature.data.items()}
        if not parts or any(part is None for part in parts.values()):
            raise MediaError("a part of an image's, video's or audio's content is missing")
        state = blake2b(feature.modality.encode(), digest_size=32)
        _feed(state, parts)
        _feed(state, feature.mm_position.is_embed)
        digest = state.digest()
        self._known[feature.identifier] = digest
        self._known.move_to_end(feature.identifier)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return digest


def _feed(state: Any, value: Any) -> None:
    """Feed different bytes for different content, shape, type or order."""
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
