"""cachegen: coarse bins, coded with probabilities by channel and token (docs/codecs.md).

After CacheGen, but a channel has one step (bin width) for all tokens.
"""

from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvhold.codecs.elements import CODED, Elements, Reader
from kvhold.codecs.quantised import LayerShape, Quantised
from kvhold.kernels import numba_bins as bins
from kvhold.kernels import numba_planes as planes
from kvhold.kernels import numba_rans_kinds as rans
from kvhold.kernels.numba_bins import Counts
from kvhold.kernels.numba_floats import LEAST_NORMAL, Bytes, Codes, Floats

RUN = 128
SHARED = 32  # at least this many elements share a class and a step
CLASSES = 16
OCTAVES = 8  # a step is 2**0 to 2**7 times the plane's base

_LEAST = 2.0**-100  # below it, inverses of steps are not finite
_NEUTRAL = 2
_HEAD = Struct("<fBBB")
_COUNT = Struct("<I")

# spread / median spread, at which the step is an octave wider
_WIDER = 2.0 ** np.arange(-6.0, 22.0, 4.0)
# mean deviations, in steps, at which classes 2, 3 ... begin
_CLASS_FROM = 2.0 ** ((np.arange(2, CLASSES) - 8.5) / 2)
_SHIFT_FROM = 2.0 ** ((np.arange(1 - bins.SHIFTS, bins.SHIFTS) - 0.5) / 2)


@dataclass(frozen=True)
class Fineness:
    """Steps, in standard deviations of a normally distributed channel.

    early: in the first quarter of the layers
    parts: a step is at most the layer's largest magnitude / parts
    """

    early_keys: float
    keys: float
    early_values: float
    values: float
    parts: float

    def of(self, place: LayerShape, plane: int) -> float:
        """A latent plane (MLA) counts as keys."""
        early = 4 * place.layer < place.layers
        if plane == 0:
            return self.early_keys if early else self.keys
        return self.early_values if early else self.values


class CacheGen(Quantised):
    """A step is at most 2/7 of the layer's largest magnitude."""

    name: ClassVar[str] = "cachegen"
    error_bound: ClassVar[float] = 0.15  # 1/7 + 8/7 * 1/256
    fineness: ClassVar[Fineness] = Fineness(
        early_keys=0.9, keys=1.05, early_values=1.1, values=1.2, parts=3.5
    )

    def _code(self, elements: Elements, place: LayerShape, out: memoryview) -> int | None:
        found = elements.reshape(place.planes, -1)
        measured = [bins.measure(plane, place.dtype, place.tokens, place.width) for plane in found]
        largest = float(np.max([channels.largest.max() for channels in measured]))
        if not np.isfinite(largest) or 0 < largest < max(_LEAST, LEAST_NORMAL[place.dtype]):
            return None
        target, end = np.frombuffer(out, np.uint8), 1
        target[0] = CODED
        for number, (plane, channels) in enumerate(zip(found, measured, strict=True)):
            steps = _Steps.choose(
                plane,
                place,
                channels,
                largest,
                self.fineness.of(place, number),
                largest / self.fineness.parts,
            )
            for piece in _plane_pieces(plane, place, steps):
                if end + piece.size > place.nbytes:
                    return None
                target[end : end + piece.size] = piece
                end += piece.size
        return end

    def _restore(self, encoded: memoryview, place: LayerShape, target: Elements) -> None:
        reader = Reader(encoded, self.name, place.layer)
        form = reader.byte()
        if form != CODED:
            raise place.wrong(f"the form {form}")
        for plane in target.reshape(place.planes, -1):
            _read_plane(reader, place, plane)
        reader.end()


class CacheGenFine(CacheGen):
    name: ClassVar[str] = "cachegen-fine"
    error_bound: ClassVar[float] = 0.07  # 1/16 + 17/16 * 1/256
    fineness: ClassVar[Fineness] = Fineness(
        early_keys=0.45, keys=0.52, early_values=0.55, values=0.6, parts=8
    )


class CacheGenSmall(CacheGen):
    name: ClassVar[str] = "cachegen-small"
    error_bound: ClassVar[float] = 0.21  # 1/5 + 6/5 * 1/256
    fineness: ClassVar[Fineness] = Fineness(
        early_keys=1.45, keys=1.7, early_values=1.75, values=1.9, parts=2.5
    )


@dataclass(frozen=True)
class _Steps:
    """octaves: [groups], a step is base * 2**octave
    offsets: [groups], the mean in whole steps
    """

    base: np.float32
    share: int
    octaves: Bytes
    offsets: Codes

    @classmethod
    def choose(
        cls,
        plane: Elements,
        place: LayerShape,
        channels: bins.Channels,
        largest: float,
        fineness: float,
        widest: float,
    ) -> "_Steps":
        """Only comparisons and products: every machine chooses the same."""
        share = max(0, (-(-SHARED // place.tokens) - 1).bit_length())
        groups = _groups(place.heads, place.head_dim, share)
        sizes = np.bincount(groups) * place.tokens
        means = np.bincount(groups, channels.sums) / sizes
        spreads = (
            np.bincount(groups, bins.distances(plane, place.dtype, place.tokens, means[groups]))
            / sizes
        )
        peaks = np.maximum.reduceat(
            channels.largest, np.flatnonzero(np.diff(groups, prepend=-1))
        ).astype(np.float64)
        wide = np.sort(spreads[spreads > 0])
        middling = float(wide[wide.size // 2]) if wide.size else largest / 16
        base = np.float32(
            max(min(1.25 * fineness * middling, widest) / 2**_NEUTRAL, largest / (2**7 * 126))
        )
        widths = float(base) * 2.0 ** np.arange(OCTAVES)
        wanted = np.minimum(
            np.searchsorted(_WIDER * middling, spreads, "right"),
            np.count_nonzero(widths <= widest) - 1,
        )
        octaves = np.maximum(wanted, np.searchsorted(widths * bins.MOST, peaks))
        offsets = np.rint(means / widths[octaves]) if largest else means
        return cls(
            base,
            share,
            octaves.astype(np.uint8),
            np.clip(offsets, -bins.MOST, bins.MOST).astype(np.int8),
        )

    def of_channels(self, place: LayerShape) -> tuple[Floats, Codes]:
        groups = _groups(place.heads, place.head_dim, self.share)
        return _widths(self.base)[self.octaves][groups], self.offsets[groups]


def _widths(base: float | np.float32) -> Floats:
    return np.minimum(
        np.float64(base) * 2.0 ** np.arange(OCTAVES), np.finfo(np.float32).max
    ).astype(np.float32)


@lru_cache(maxsize=64)
def _groups(heads: int, head_dim: int, share: int) -> Counts:
    in_head = np.arange(head_dim) >> share
    groups = np.asarray((np.arange(heads) * (in_head[-1] + 1))[:, None] + in_head).reshape(-1)
    groups.setflags(write=False)
    return groups


@lru_cache(maxsize=64)
def _bounds(heads: int, head_dim: int) -> Counts:
    begins = np.arange(heads)[:, None] * head_dim + np.arange(0, head_dim, RUN)
    bounds = np.append(begins.reshape(-1), heads * head_dim)
    bounds.setflags(write=False)
    return bounds


def _plane_pieces(plane: Elements, place: LayerShape, steps: _Steps) -> list[Bytes]:
    of_channels, offsets = steps.of_channels(place)
    deviations = bins.quantise(plane, place.dtype, of_channels, offsets)
    coding = _Coding.choose(deviations, place, _groups(place.heads, place.head_dim, steps.share))
    reach = np.maximum(coding.lengths.astype(np.int64) - 1, 0)
    symbols, exceptions = bins.to_symbols(deviations, coding.kinds, offsets, reach)
    words, segments = rans.encode(
        symbols, coding.kinds, place.width, _probabilities(coding.lengths, coding.frequencies)
    )
    channels = (
        coding.classes
        | steps.octaves << np.uint8(4)
        | (steps.offsets != 0).astype(np.uint8) << np.uint8(7)
    )
    head = _HEAD.pack(steps.base, steps.share, bool(coding.shifts.size), coding.lengths.size)
    return [
        np.frombuffer(head, np.uint8),
        channels,
        steps.offsets[steps.offsets != 0].view(np.uint8),
        _pack_shifts(coding.shifts),
        coding.lengths,
        coding.frequencies[_stored(coding.lengths)].astype("<u2").view(np.uint8),
        np.frombuffer(_COUNT.pack(exceptions.size), np.uint8),
        exceptions.view(np.uint8),
        segments.astype("<u4").view(np.uint8),
        words.astype("<u2").view(np.uint8),
    ]


@dataclass(frozen=True)
class _Coding:
    """shifts: [tokens, runs], or empty
    kinds: [tokens * width], numbers of distributions
    """

    classes: Bytes
    shifts: Codes
    kinds: Bytes
    lengths: Bytes
    frequencies: rans.Frequencies

    @classmethod
    def choose(cls, deviations: bins.Deviations, place: LayerShape, groups: Counts) -> "_Coding":
        bounds = _bounds(place.heads, place.head_dim)
        found = bins.magnitudes(deviations, place.width, bounds)
        sizes = np.bincount(groups)
        means = np.bincount(groups, found.of_columns) / (sizes * place.tokens)
        expected = np.add.reduceat(means[groups], bounds[:-1])
        shifts = (
            np.searchsorted(
                _SHIFT_FROM, found.of_runs / np.where(expected > 0, expected, 1), "right"
            )
            - bins.SHIFTS
        )
        # Shifts must save half a byte per run. A number off by a factor of sqrt(2) costs 1/7 bit,
        # by a factor of 2 four times as much.
        if np.square(shifts).sum() * place.width < 28 * bounds[1:].size * shifts.size:
            shifts = np.zeros((0, 0))
        else:
            gains = np.repeat((2.0 ** (shifts / 2)).sum(axis=0), np.diff(bounds))
            means *= sizes * place.tokens / np.bincount(groups, gains)
        classes = (np.searchsorted(_CLASS_FROM, means, "right") + (means > 0)).astype(np.uint8)
        kinds = bins.spread_kinds(
            classes[groups], shifts.astype(np.int8), bounds, place.tokens, CLASSES
        )
        counts = bins.count(deviations, kinds, CLASSES)
        used = 1 + max(int(classes.max()), int(np.flatnonzero(counts.any(axis=1))[-1]))
        return cls(
            classes, shifts.astype(np.int8), kinds, *bins.frequencies(counts[:used], rans.SCALE)
        )


def _probabilities(lengths: Bytes, frequencies: rans.Frequencies) -> rans.Frequencies:
    probabilities = np.zeros((lengths.size, 256), np.uint16)
    probabilities[:, : bins.REACH + 1] = frequencies
    probabilities[:, -bins.REACH :] = frequencies[:, :0:-1]
    probabilities[lengths == 0, 0] = rans.SCALE
    probabilities[:, bins.ESCAPE] = rans.SCALE - probabilities.sum(axis=1)
    return probabilities


def _stored(lengths: Bytes) -> npt.NDArray[np.bool_]:
    return np.asarray(np.arange(bins.REACH + 1) < lengths[:, None])


def _pack_shifts(shifts: Codes) -> Bytes:
    halves = shifts.reshape(-1).view(np.uint8) & np.uint8(15)
    halves = np.append(halves, np.zeros(halves.size % 2, np.uint8))
    return np.asarray(halves[::2] | halves[1::2] << np.uint8(4))


def _read_plane(reader: Reader, place: LayerShape, plane: Elements) -> None:
    base, share, shifted, num_kinds = _HEAD.unpack(reader.take(_HEAD.size))
    if not 0 <= base < np.inf or share > 15 or shifted > 1 or not 1 <= num_kinds <= CLASSES:
        raise reader.wrong(f"a plane that begins with {base}, {share}, {shifted}, {num_kinds}")
    shape = planes.PlaneShape(
        place.tokens,
        _groups(place.heads, place.head_dim, share),
        _bounds(place.heads, place.head_dim),
    )
    used = planes.restore(
        np.frombuffer(reader.rest(), np.uint8),
        shape,
        _widths(base),
        num_kinds,
        bool(shifted),
        place.dtype,
        plane,
    )
    if used < 0:
        raise reader.wrong(planes.WRONG[used])
    reader.take(used)
