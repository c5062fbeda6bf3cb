from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.codecs import Codec
from kvhold_lab.bench.quality.model import Bits, QualitySubject
from kvhold_lab.bench.quality.passing import Passed, through
from kvhold_lab.bench.quality.tasks import KINDS, NO_KIND, Exams

LEAST_ACCURACY = 0.5

_NAMES = {mark: name for name, mark in KINDS.items()}


@dataclass(frozen=True)
class QualityRow:
    """accuracy: share of answer tokens guessed first; None without recall
    accuracy_drop:    points (hundredths) lost; None also below `LEAST_ACCURACY`
    kl:               mean KL(unchanged || codec) before each answer token, in nats
    perplexity_ratio: codec / unchanged
    error:            as in `CodecRow`
    """

    codec: str
    ratio: float
    accuracy: float | None
    accuracy_drop: float | None
    accuracy_drop_se: float | None
    kl: float
    perplexity_ratio: float
    error: float
    answers: int
    contexts: int
    by_kind: dict[str, float]


@dataclass(frozen=True)
class MeasuredChannels:
    """Root mean square of the largest channel / the median one, by layer."""

    keys: list[float]
    values: list[float]

    @classmethod
    def of(cls, kv: Bits) -> "MeasuredChannels":
        """kv: `[exams, layers, 2, tokens, heads, head_dim]`, bfloat16 as uint16"""
        numbers = (kv.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        sizes = np.sqrt((numbers**2).mean(axis=(0, 3)))
        flat = sizes.reshape(*sizes.shape[:2], -1)
        unlike = flat.max(-1) / np.maximum(np.median(flat, axis=-1), np.finfo(np.float64).tiny)
        return cls(unlike[:, 0].tolist(), unlike[:, 1].tolist())


def measure(
    subject: QualitySubject,
    batches: Iterable[Exams],
    codecs: Sequence[Codec],
    *,
    recall: bool = True,
) -> list[QualityRow]:
    """recall: the context contains the answers"""
    tallies = [_Tally(codec.name) for codec in codecs]
    for exams in batches:
        kv = subject.prefill(exams.contexts)
        untouched = _Guesses.of(subject.answer(kv, exams.questions), exams)
        for codec, tally in zip(codecs, tallies, strict=True):
            passed = through(codec, kv, subject.layout)
            tally.add(
                exams,
                untouched,
                _Guesses.of(subject.answer(passed.bits, exams.questions), exams),
                passed,
            )
    return [tally.row(recall=recall) for tally in tallies]


@dataclass(frozen=True)
class _Guesses:
    """log_shares: [answers, vocabulary]; right: [answers]"""

    log_shares: npt.NDArray[np.float64]
    of_answers: npt.NDArray[np.float64]
    right: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, logits: Any, exams: Exams) -> "_Guesses":
        rows, places = np.nonzero(exams.kinds != NO_KIND)
        assert (places > 0).all(), "before a first token there is nothing on top of the KV"
        answers = exams.questions[rows, places]
        log_shares = logits[rows, places - 1].double().log_softmax(-1).numpy()
        return cls(
            log_shares,
            log_shares[np.arange(len(answers)), answers],
            log_shares.argmax(-1) == answers,
        )


@dataclass
class _Tally:
    codec: str
    plain_bytes: int = 0
    frame_bytes: int = 0
    error: float = 0.0
    divergence: float = 0.0
    log_before: float = 0.0
    log_after: float = 0.0
    right_before: int = 0
    right_after: int = 0
    lost: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    kinds: dict[int, list[int]] = field(default_factory=dict)

    def add(self, exams: Exams, before: _Guesses, after: _Guesses, passed: Passed) -> None:
        self.plain_bytes += passed.plain_bytes
        self.frame_bytes += passed.frame_bytes
        self.error = max(self.error, passed.error)
        self.divergence += float(
            (np.exp(before.log_shares) * (before.log_shares - after.log_shares)).sum()
        )
        self.log_before += float(before.of_answers.sum())
        self.log_after += float(after.of_answers.sum())
        self.right_before += int(before.right.sum())
        self.right_after += int(after.right.sum())
        contexts = np.nonzero(exams.kinds != NO_KIND)[0]
        count = exams.kinds.shape[0]
        self.lost += (
            np.bincount(contexts, before.right.astype(int) - after.right, count)
            .astype(int)
            .tolist()
        )
        self.asked += np.bincount(contexts, minlength=count).tolist()
        kinds = exams.kinds[exams.kinds != NO_KIND]
        for kind in np.unique(kinds).tolist():
            right, of = self.kinds.setdefault(kind, [0, 0])
            self.kinds[kind] = [
                right + int(after.right[kinds == kind].sum()),
                of + int((kinds == kind).sum()),
            ]

    def row(self, *, recall: bool) -> QualityRow:
        answers = sum(self.asked)
        drop = 100 * (self.right_before - self.right_after) / answers
        told = recall and self.right_before / answers >= LEAST_ACCURACY
        return QualityRow(
            codec=self.codec,
            ratio=self.plain_bytes / self.frame_bytes,
            accuracy=self.right_after / answers if recall else None,
            accuracy_drop=drop if told else None,
            accuracy_drop_se=standard_error(self.lost, self.asked) if told else None,
            kl=self.divergence / answers,
            perplexity_ratio=float(np.exp((self.log_before - self.log_after) / answers)),
            error=self.error,
            answers=answers,
            contexts=len(self.asked),
            by_kind={_NAMES[kind]: right / of for kind, (right, of) in sorted(self.kinds.items())}
            if recall
            else {},
        )


def standard_error(lost: Sequence[int], asked: Sequence[int]) -> float:
    losses, sizes = np.array(lost, float), np.array(asked, float)
    apart = losses - sizes * (losses.sum() / sizes.sum())
    count = len(losses)
    return (
        float("nan")
        if count < 2
        else float(100 * np.sqrt(count / (count - 1) * (apart**2).sum()) / sizes.sum())
    )
