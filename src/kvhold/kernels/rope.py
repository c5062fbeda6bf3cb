"""Turn stored keys, which are rotated to old positions, to new ones.

    rope = Rope.of(model.config.to_dict())
    rotate(keys, old_positions, new_positions, rope, out=keys)

Any thread. All workers give the same bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import ConfigError
from kvhold.kernels.rotary import NO_SCALING, Floats, Rotations, Scaling, frequencies

RopeLayout: TypeAlias = Literal["half", "interleaved"]
Worker: TypeAlias = Literal["numba", "triton", "reference"]


@dataclass(frozen=True)
class Rope:
    """How keys are rotated.

    head_dim:   elements of a head; of a whole latent row (MLA)
    rotary_dim: rotated elements, even; 0: none (NoPE, ALiBi)
    layout:     a pair is elements i and i + rotary_dim // 2 ("half"), or 2 i and 2 i + 1
    first:      the first rotated element
    """

    head_dim: int
    rotary_dim: int
    theta: float = 10_000.0
    layout: RopeLayout = "half"
    scaling: Scaling = NO_SCALING
    first: int = 0

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 <= self.first <= self.head_dim - self.rotary_dim:
            raise ConfigError(
                f"rotary_dim is {self.rotary_dim} from element {self.first} on; it must be even, "
                f"and within head_dim {self.head_dim}"
            )
        if self.layout not in get_args(RopeLayout):
            raise ConfigError(f"layout is {self.layout!r}; it must be 'half' or 'interleaved'")

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        *,
        layout: RopeLayout | None = None,
        layer_type: str = "",
    ) -> "Rope":
        """Read a Hugging Face config. Raises ConfigError that names the field.

        layout:     None: as transformers stores keys of `model_type`. MLA: of the latent row
        layer_type: for settings by type
        """
        from kvhold.kernels.rope_config import rope_of

        return cls(**rope_of(config, layout, layer_type))

    def frequencies(self, length: int = 0) -> Floats:
        """Radians per position, [rotary_dim // 2]. length: in tokens, for "dynamic"."""
        return frequencies(
            self.rotary_dim,
            self.theta,
            self.scaling,
            length if self.scaling.kind == "dynamic" else 0,
        )


def rotate(
    keys: Any,
    old_positions: npt.ArrayLike,
    new_positions: npt.ArrayLike,
    rope: Rope,
    *,
    old_length: int | None = None,
    new_length: int | None = None,
    out: Any = None,
    worker: Worker | None = None,
) -> Any:
    """Return keys turned to new positions, in float32 arithmetic.

    keys:          [..., tokens, heads, head_dim], numpy or torch: float32, float16 or bfloat16
                   (numpy: uint16)
    old_positions: [tokens], of `keys`
    old_length:    of the sequence, for "dynamic"; None: its last position + 1
    out:           `keys`, or other memory of this shape and dtype; None: new

    Raises ValueError.
    """
    old, new = as_positions(old_positions), as_positions(new_positions)
    is_numpy = isinstance(keys, np.ndarray)
    if dtype_of(keys) not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"keys are {dtype_of(keys)}; they must be float32, float16 or bfloat16 (numpy: uint16)"
        )
    if keys.ndim < 3 or keys.shape[-1] != rope.head_dim:
        raise ValueError(
            f"keys have the shape {tuple(keys.shape)}; it must be [..., tokens, heads, "
            f"{rope.head_dim}]"
        )
    tokens = keys.shape[-3]
    if not old.size == new.size == tokens:
        raise ValueError(
            f"{old.size} old and {new.size} new positions for {tokens} tokens; each needs one"
        )
    if out is None:
        out = np.empty_like(keys) if is_numpy else keys.new_empty(keys.shape)
    elif out.shape != keys.shape or out.dtype != keys.dtype:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; keys are {keys.dtype} {tuple(keys.shape)}"
        )
    if not rope.rotary_dim:
        if out is not keys:
            out[...] = keys
        return out
    device = "cpu" if is_numpy else str(keys.device)
    table = rotations(rope, old, new, old_length, new_length)
    _load(worker or _chosen(device.partition(":")[0]))(keys, table, rope, out)
    return out


def dtype_of(keys: Any) -> str:
    name = str(keys.dtype).removeprefix("torch.")
    is_bits = name == "uint16" and isinstance(keys, np.ndarray)
    return "bfloat16" if is_bits else name


def as_positions(positions: Any) -> npt.NDArray[np.int64]:
    """[tokens]. Raises ValueError."""
    found = np.asarray(positions.cpu() if hasattr(positions, "cpu") else positions)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"positions must be integers [tokens], not {found.dtype} {found.shape}")
    if found.size and int(found.min()) < 0:
        raise ValueError(f"a position is {int(found.min())}; it must be 0 or more")
    return found.astype(np.int64)


def rotations(
    rope: Rope,
    old: npt.NDArray[np.int64],
    new: npt.NDArray[np.int64],
    old_length: int | None = None,
    new_length: int | None = None,
) -> Rotations:
    """The last two are kept: layers share them."""
    return _rotations(
        rope, old.tobytes(), new.tobytes(), _length(old, old_length), _length(new, new_length)
    )


def _length(positions: npt.NDArray[np.int64], length: int | None) -> int:
    if length is None:
        return int(positions.max(initial=-1)) + 1
    return length


@lru_cache(maxsize=2)
def _rotations(rope: Rope, old: bytes, new: bytes, old_length: int, new_length: int) -> Rotations:
    return Rotations.between(
        np.frombuffer(old, np.int64),
        np.frombuffer(new, np.int64),
        rope.frequencies(old_length),
        rope.frequencies(new_length),
    )


@cache
def _chosen(device_type: str) -> Worker:
    worker: Worker = "numba" if device_type == "cpu" else "triton"
    if device_type not in ("cpu", "cuda"):
        return "reference"
    try:
        import_module(worker)
    except ImportError:
        return "reference"
    return worker


@cache
def _load(worker: Worker) -> Callable[[Any, Rotations, Rope, Any], None]:
    found: Callable[[Any, Rotations, Rope, Any], None] = import_module(
        f"kvhold.kernels.{worker}_rope"
    ).rotate
    return found
