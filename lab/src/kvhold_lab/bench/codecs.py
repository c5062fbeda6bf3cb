"""Codecs on one core: ratio, speed and error."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.codecs import Codec, make_codec
from kvhold.codecs.budget import measured_error
from kvhold.core.layout import Group, Layout

Bits = npt.NDArray[np.uint16]

ROUNDS = 7
LAYERS, TOKENS, HEADS, HEAD_DIM = (16, 256, 8, 128)
TRAINED_CHUNKS = 16


@dataclass(frozen=True)
class CodecRow:
    """enc_mb_s, dec_mb_s: unencoded bytes / 1e6 a second
    error:              largest |decoded - original| / largest |original|, the worst layer's
    accuracy_drop:      points lost in `kvhold bench quality`; None: not measured
    """

    codec: str
    data: str
    ratio: float
    enc_mb_s: float
    dec_mb_s: float
    error: float
    accuracy_drop: float | None
    memcpy_mb_s: float

    def __str__(self) -> str:
        enc, dec = (
            f"{rate:7.0f} {rate / self.memcpy_mb_s:5.2f}" for rate in (self.enc_mb_s, self.dec_mb_s)
        )
        drop = "-" if self.accuracy_drop is None else f"{self.accuracy_drop:.2f}"
        return (
            f"{self.codec:16} {self.data:12} {self.ratio:6.3f}  {enc}  {dec}  "
            f"{self.error:8.5f}  {self.memcpy_mb_s:7.0f}  {drop:>6}"
        )


HEADING = (
    f"{'codec':16} {'KV':12} {'ratio':>6}  {'enc MB/s, of memcpy':>13}  {'dec, of it':>13}  "
    f"{'error':>8}  {'memcpy':>7}  {'drop':>6}"
)


@dataclass(frozen=True)
class CodecSample:
    """bfloat16 as uint16 [chunks * layers, planes, tokens, heads, head_dim]."""

    bits: Bits
    chunks: int = 1

    @property
    def layers(self) -> int:
        return len(self.bits) // self.chunks

    @property
    def layout(self) -> Layout:
        _, planes, tokens, heads, head_dim = self.bits.shape
        group = Group(
            layers=self.layers, planes=planes, heads=heads, head_dim=head_dim, dtype="bfloat16"
        )
        return Layout(groups=(group,), tokens_per_chunk=tokens)


def synthetic() -> CodecSample:
    rng = np.random.default_rng(0)
    shape = (LAYERS, TOKENS, HEADS, HEAD_DIM)
    channels = (LAYERS, 1, HEADS, HEAD_DIM)
    sizes = np.exp(0.4 * rng.standard_normal(channels))
    large = rng.random(channels) < 1 / 32
    sizes = np.where(large, sizes * rng.uniform(8, 16, channels), sizes)
    keys = (
        rng.standard_normal(shape, np.float32)
        + np.where(large, rng.choice([-1.5, 1.5], channels), 0)
    ) * sizes
    values = (
        0.5
        * rng.standard_normal(shape, np.float32)
        * np.exp(0.3 * rng.standard_normal((LAYERS, TOKENS, 1, 1)))
    )
    return CodecSample(_bfloat16(np.stack([keys, values], axis=1).astype(np.float32)))


def normal() -> CodecSample:
    return CodecSample(
        _bfloat16(
            np.random.default_rng(1).standard_normal(
                (LAYERS, 2, TOKENS, HEADS, HEAD_DIM), np.float32
            )
        )
    )


def from_model(checkpoint: Path) -> CodecSample:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    text = " ".join(
        f"{number} times {number + 3} is {number * (number + 3)}, as everybody knows."
        for number in range(TOKENS)
    )
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    layers = [
        np.stack([part[0].transpose(0, 1).float().numpy() for part in (layer.keys, layer.values)])
        for layer in cache.layers
    ]
    return CodecSample(_bfloat16(np.stack(layers)))


def trained() -> CodecSample:
    from kvhold_lab.bench.quality.run import trained_kv

    kv = trained_kv(TRAINED_CHUNKS)
    chunks, layers, *rest = kv.shape
    return CodecSample(kv.reshape(chunks * layers, *rest), chunks)


def rows(
    names: Sequence[str],
    samples: dict[str, CodecSample],
    rounds: int = ROUNDS,
    *,
    drops: Mapping[str, float | None] | None = None,
) -> Iterator[CodecRow]:
    codecs = [make_codec(name) for name in names]
    for data, sample in samples.items():
        runs = [_Run(codec, sample) for codec in codecs]
        plain, target = sample.bits.reshape(-1), np.ones_like(sample.bits).reshape(-1)
        copies = [_seconds(lambda: np.copyto(target, plain)) for _ in range(2)]  # noqa: B023
        for number in range(1 + rounds):
            copies.append(_seconds(lambda: np.copyto(target, plain)))  # noqa: B023
            for run in runs:
                run.measure(counts=number > 0)
        memcpy = plain.nbytes / median(copies[2:]) / 1e6
        for run in runs:
            yield run.row(data, memcpy, (drops or {}).get(run.name))


class _Run:
    def __init__(self, codec: Codec, sample: CodecSample) -> None:
        self.name = codec.name
        self._codec, self._sample = codec, sample
        self._layout = sample.layout
        layers, _, self._tokens, _, _ = sample.bits.shape
        self._most = codec.max_size(self._layout, 0, self._tokens)
        self._encoded = np.ones((layers, self._most), np.uint8)
        self._decoded = np.ones_like(sample.bits)
        self._lengths = [0] * layers
        self._enc: list[float] = []
        self._dec: list[float] = []

    def measure(self, *, counts: bool) -> None:
        enc, dec = _seconds(self._encode), _seconds(self._decode)
        if counts:
            self._enc.append(enc)
            self._dec.append(dec)

    def row(self, data: str, memcpy: float, accuracy_drop: float | None) -> CodecRow:
        plain = self._sample.bits.nbytes
        error = max(
            measured_error(before, after, "bfloat16")
            for before, after in zip(self._sample.bits, self._decoded, strict=True)
        )
        if error > self._codec.error_bound or (
            self._codec.lossless and not np.array_equal(self._sample.bits, self._decoded)
        ):
            raise AssertionError(
                f"codec {self._codec.name} is off by {error}, and states {self._codec.error_bound}"
            )
        return CodecRow(
            codec=self._codec.name,
            data=data,
            ratio=plain / sum(self._lengths),
            enc_mb_s=plain / median(self._enc) / 1e6,
            dec_mb_s=plain / median(self._dec) / 1e6,
            error=error,
            accuracy_drop=accuracy_drop,
            memcpy_mb_s=memcpy,
        )

    def _encode(self) -> None:
        for at, plain in enumerate(self._sample.bits):
            layer, out = at % self._sample.layers, _view(self._encoded[at])
            self._lengths[at] = self._codec.encode(
                _view(plain),
                out,
                layout=self._layout,
                group=0,
                layer=layer,
                num_tokens=self._tokens,
            )

    def _decode(self) -> None:
        for at, length in enumerate(self._lengths):
            layer, encoded, out = (
                at % self._sample.layers,
                self._encoded[at, :length],
                self._decoded[at],
            )
            self._codec.decode(
                _view(encoded),
                _view(out),
                layout=self._layout,
                group=0,
                layer=layer,
                num_tokens=self._tokens,
            )


def _view(array: npt.NDArray[Any]) -> memoryview:
    assert array.flags.c_contiguous, "of a copy, nothing would come back"
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _bfloat16(values: npt.NDArray[np.float32]) -> Bits:
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _seconds(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
