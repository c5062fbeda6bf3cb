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
"""Plain bytes / frame bytes of a small model's bfloat16 KV (docs/quality.md)."""


@dataclass(frozen=True)
class Fit:
    place: str
    size_bytes: int
    codec: str
    ratio: float
    tokens: int


def is_measured(codec: str, dtype: str) -> bool:
    return codec in RATIOS and (codec == "raw" or DTYPE_BYTES[dtype] == 2)


def ratio_of(codec: str, dtype: str) -> float:
    """Plain bytes / frame bytes. Raises ConfigError: not measured."""
    if codec not in RATIOS:
        raise ConfigError(f"codec is {codec!r}; measured are {', '.join(RATIOS)}")
    if not is_measured(codec, dtype):
        raise ConfigError(
            f"codec is {codec!r}, whose ratio was measured on 16-bit KV; for {dtype} use raw"
        )
    return RATIOS[codec]


def fits(
    place: str,
    size_bytes: int,
    chunk_bytes: int,
    tokens_per_chunk: int,
    dtype: str,
    codecs: Sequence[str],
) -> list[Fit]:
    """One row per codec. chunk_bytes: in memory."""
    ratios = {codec: ratio_of(codec, dtype) for codec in codecs}
    return [
        Fit(
            place,
            size_bytes,
            codec,
            ratio,
            int(size_bytes * ratio) // chunk_bytes * tokens_per_chunk,
        )
        for codec, ratio in ratios.items()
    ]
