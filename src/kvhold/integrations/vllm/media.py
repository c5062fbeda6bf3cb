"""What in a prompt is no text, by a hash of all its content: images, video, audio.

    inserts = Media().inserts_of(request)     # None: some of it cannot be told

vLLM names such content by an identifier that the user may have chosen; what one user calls "photo", another does, too. So the content
itself is hashed, as the model gets it (the processor's tensors), whole. vLLM leaves it out where this process has had it before, under
the same identifier; then its hash of that time counts, as for vLLM its encoder's output does.
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

_REMEMBERED = 10_000  # contents; a hash and an identifier each


class Media:
    """Hashes, and those of before. For one thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, bytes] = OrderedDict()

    def inserts_of(self, request: "Request") -> list[Insert] | None:
        """One insert for each of the request's contents. None when one cannot be told. Raises TypeError for content of unknown make."""
        inserts = []
        for feature in request.mm_features:
            digest = self._digest(feature)
            if digest is None:
                return None
            inserts.append(Insert(feature.mm_position.offset, feature.mm_position.length, digest))
        return inserts

    def _digest(self, feature: Any) -> bytes | None:
        if feature.data is None:
            digest = self._known.get(feature.identifier)
            if digest is not None:
                self._known.move_to_end(feature.identifier)
            return digest
        state = blake2b(feature.modality.encode(), digest_size=32)
        _feed(state, {name: element.data for name, element in feature.data.items()})
        _feed(state, feature.mm_position.is_embed)
        digest = state.digest()
        self._known[feature.identifier] = digest
        self._known.move_to_end(feature.identifier)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return digest


def _feed(state: Any, value: Any) -> None:
    """All of a value, so that no two of different content, shape, type or order feed the same bytes."""
    match value:
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().view(-1) if value.ndim else value.detach().cpu().reshape(1)
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
