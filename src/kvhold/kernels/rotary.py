"""Frequencies of rotary embeddings."""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
ScalingKind: TypeAlias = Literal["none", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True)
class Scaling:
    """max_length: of the trained context, in tokens"""

    kind: ScalingKind = "none"
    factor: float = 1.0
    max_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq: float = 1.0
    high_freq: float = 4.0


NO_SCALING = Scaling()


@lru_cache(maxsize=16)
def frequencies(rotary_dim: int, theta: float, scaling: Scaling, length: int) -> Floats:
    """Radians per position, [rotary_dim // 2]. length: of the sequence, for "dynamic" """
    if not rotary_dim:
        return np.empty(0, np.float32)
    factor, base = scaling.factor, theta
    if scaling.kind == "dynamic":
        stretch = factor * max(length, scaling.max_length) / scaling.max_length - (factor - 1)
        base *= stretch ** (rotary_dim / (rotary_dim - 2))
    plain = base ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    if scaling.kind == "linear":
        plain = plain / factor
    elif scaling.kind == "yarn":
        kept = 1 - _ramp(rotary_dim, theta, scaling)
        plain = plain / factor * (1 - kept) + plain * kept
    elif scaling.kind == "llama3":
        turns = scaling.max_length * plain / (2 * math.pi)
        smooth = (turns - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
        smooth = np.clip(smooth, 0, 1)
        plain = (1 - smooth) * plain / factor + smooth * plain
    found: Floats = plain.astype(np.float32)
    found.flags.writeable = False
    return found


def _ramp(rotary_dim: int, theta: float, scaling: Scaling) -> npt.NDArray[np.float64]:
    """0: keep the frequency; 1: divide it."""

    def pair_of(turns: float) -> float:
        return (
            rotary_dim
            * math.log(scaling.max_length / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high += 0.001 * (low == high)
    return np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)


@dataclass(frozen=True, eq=False)
class Rotations:
    """cos, sin: [tokens, rotary_dim // 2]"""

    cos: Floats
    sin: Floats
    _elsewhere: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def between(
        cls,
        old: npt.NDArray[np.int64],
        new: npt.NDArray[np.int64],
        old_frequencies: Floats,
        new_frequencies: Floats,
    ) -> "Rotations":
        """Angles are rounded to float32, as in engines."""
        angles = _angles(new, new_frequencies) - _angles(old, old_frequencies)
        return cls(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    def on(self, device: str) -> tuple[Any, Any]:
        """As torch tensors."""
        import torch

        if device not in self._elsewhere:
            cos, sin = (torch.from_numpy(table).to(device) for table in (self.cos, self.sin))
            self._elsewhere[device] = cos, sin
        return self._elsewhere[device]


def _angles(positions: npt.NDArray[np.int64], radians: Floats) -> npt.NDArray[np.float64]:
    product: Floats = positions.astype(np.float32)[:, None] * radians
    return product.astype(np.float64)
