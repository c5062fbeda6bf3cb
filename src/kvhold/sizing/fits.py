"""How many tokens' KV fits into a place: memory as it is, a tier below it by a codec."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold.core.errors import ConfigError
from kvhold.core.layout import DTYPE_BYTES

RATIOS = {
    "raw": 1.0,
    "lossless": 1.493,
    "int8": 1.877,
    "fp8": 1.929,
    "k8v4": 2.362,
    "kivi4": 3.053,
    "turboquant4": 3.537,
    "kivi2": 4.879,
    "cachegen-fine": 4.951,
    "cachegen": 7.021,
    "cachegen-small": 9.408,
}
"""Plain bytes / bytes of frames, of bfloat16 KV of the small trained model, as docs/quality.md has them. A large model's differ."""


@dataclass(frozen=True)
class Fit:
    """tokens: of whole chunks, that fit into `size_bytes` by a codec that makes KV `ratio` times smaller"""

    place: str
    size_bytes: int
    codec: str
    ratio: float
    tokens: int


def is_measured(codec: str, dtype: str) -> bool:
    """Whether it is known how much smaller a codec makes KV of this type."""
    return codec in RATIOS and (codec == "raw" or DTYPE_BYTES[dtype] == 2)


def ratio_of(codec: str, dtype: str) -> float:
    """How much smaller a codec makes KV of this type, where that was measured. Raises ConfigError where it was not."""
    if codec not in RATIOS:
        raise ConfigError(f"codec is {codec!r}; measured are {', '.join(RATIOS)}")
    if not is_measured(codec, dtype):
        raise ConfigError(f"codec is {codec!r}, whose ratio was measured on 16-bit KV; for {dtype} use raw")
    return RATIOS[codec]


def fits(place: str, size_bytes: int, chunk_bytes: int, tokens_per_chunk: int, dtype: str, codecs: Sequence[str]) -> list[Fit]:
    """A row for each codec. chunk_bytes: of a whole chunk in memory."""
    ratios = {codec: ratio_of(codec, dtype) for codec in codecs}
    return [
        Fit(place, size_bytes, codec, ratio, int(size_bytes * ratio) // chunk_bytes * tokens_per_chunk) for codec, ratio in ratios.items()
    ]
