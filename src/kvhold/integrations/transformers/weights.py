"""A digest of weights. The first call reads all bytes, later ones each tensor's address, version
counter and 16 elements. One thread at a time.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from kvhold.core.encoding import canonical
from kvhold.core.errors import ConfigError

log = logging.getLogger(__name__)

_SAMPLES = 16
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class _Mark:
    address: int
    version: int
    dtype: str
    shape: tuple[int, ...]
    samples: bytes


@dataclass
class Weights:
    model: Any
    _marks: dict[str, _Mark] = field(default_factory=dict)
    _digests: dict[str, bytes] = field(default_factory=dict)

    def digest(self) -> str:
        """32 hexadecimal digits. Raises ConfigError: unreadable weights."""
        try:
            return self._digest()
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"model_id must be given: the weights' content cannot be read: {error}"
            ) from error

    def _digest(self) -> str:
        tensors = dict(
            sorted(
                [*self.model.named_parameters(), *self.model.named_buffers()],
                key=lambda item: item[0],
            )
        )
        marks = _marks(tensors)
        changed = {name for name, mark in marks.items() if self._marks.get(name) != mark}
        if changed or marks.keys() != self._marks.keys():
            started_s = time.monotonic()
            self._digests = {
                name: self._digests[name] if name not in changed else _read(tensors[name])
                for name in tensors
            }
            self._marks = marks
            nbytes = sum(tensors[name].nbytes for name in changed)
            log.info(
                "read %d of %d tensors (%.2f GB) of the model in %.2f s",
                len(changed),
                len(marks),
                nbytes / 1e9,
                time.monotonic() - started_s,
            )
        return xxh3_128(
            canonical([[name, digest] for name, digest in self._digests.items()])
        ).hexdigest()


def _marks(tensors: dict[str, Any]) -> dict[str, _Mark]:
    by_type: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ConfigError(
                f"model_id must be given: {name} is not in memory (offloaded), so the "
                "weights' content cannot be read"
            )
        by_type.setdefault((tensor.dtype, tensor.device), []).append(name)
    samples: dict[str, bytes] = {}
    for names in by_type.values():
        rows = _bytes_of(torch.stack([_samples(tensors[name].detach()) for name in names])).reshape(
            len(names), -1
        )
        samples.update(zip(names, map(bytes, rows), strict=True))
    return {
        name: _Mark(
            t.data_ptr(),
            -1 if t.is_inference() else t._version,
            str(t.dtype),
            tuple(t.shape),
            samples[name],
        )
        for name, t in tensors.items()
    }


def _samples(tensor: Any) -> Any:
    if not tensor.numel():
        return tensor.new_zeros(_SAMPLES)
    step = sum(
        (size - 1) // (_SAMPLES - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.as_strided((_SAMPLES,), (step,))


def _read(tensor: Any) -> bytes:
    state = xxh3_128(canonical([str(tensor.dtype), list(tensor.shape)]))
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(max(1, _PIECE_BYTES // max(1, flat.element_size()))):
        state.update(_bytes_of(piece).data)
    return state.digest()


def _bytes_of(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    raw: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).cpu().numpy()
    return raw
