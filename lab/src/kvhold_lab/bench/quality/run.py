from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvhold.codecs import make_codec
from kvhold.core.errors import ConfigError
from kvhold_lab.bench.quality.measure import LEAST_ACCURACY, MeasuredChannels, QualityRow, measure
from kvhold_lab.bench.quality.model import Bits, QualitySubject, find_weights, load_subject
from kvhold_lab.bench.quality.tasks import Asked, Exams, draw
from kvhold_lab.bench.quality.writing import QUESTIONS, continued, written_recall

CHUNK_TOKENS = 128
CONTEXTS, OTHER_CONTEXTS = 256, 32
SEED = 1_000_003
SHORTEST, LONGEST = 260, 500  # tokens of context
ASKED = Asked(lookups=8, hops=2, runs=1)

_BATCH = 8


class NotMeasurable(ConfigError):
    pass


@dataclass(frozen=True)
class Evaluation:
    rows: list[QualityRow]
    what: str
    channels: MeasuredChannels


def evaluate(
    codecs: Sequence[str],
    *,
    model: str | Path | None = None,
    text: Path | None = None,
    num_contexts: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Evaluation:
    """model: a folder or name for transformers; None: the small trained one
    text:  ask for its continuation instead of questions
    """
    used = [make_codec(name) for name in codecs]
    if num_contexts is None:
        num_contexts = CONTEXTS if model is None else OTHER_CONTEXTS
    subject = _load(model, chunk_tokens)
    if text is not None:
        if subject.tokenizer is None:
            raise ConfigError(f"{subject.name} knows no text; name a language model with --model")
        tokens = subject.tokenizer.encode(text.read_text(encoding="utf-8"))
        batches = list(continued(tokens, num_contexts=num_contexts, num_tokens=LONGEST))
        what = (
            f"how {text.name} goes on after {LONGEST} tokens; nothing is to be recalled, so "
            "there is no accuracy"
        )
    elif subject.recalls:
        batches = list(recall_batches(num_contexts))
        what = f"recall of keys, two hops and runs from contexts of {SHORTEST} to {LONGEST} tokens"
    else:
        batches = list(
            written_recall(
                subject.tokenizer, num_contexts=num_contexts, num_tokens=LONGEST, seed=SEED
            )
        )
        what = (
            f"{QUESTIONS} numbers written down in some {LONGEST} tokens of context, by their tokens"
        )
    channels = MeasuredChannels.of(subject.prefill(batches[0].contexts[:1]))
    rows = measure(subject, batches, used, recall=text is None)
    name = "the small trained model" if model is None else subject.name
    what = f"{name}: {what}; {rows[0].answers:,} answer tokens after {rows[0].contexts} contexts"
    if any(row.accuracy is not None and row.accuracy_drop is None for row in rows):
        what += (
            f"; it answers less than {LEAST_ACCURACY:.0%} even on its own KV, so a drop would "
            "say nothing and only KL and perplexity count"
        )
    return Evaluation(rows, what, channels)


def recall_batches(num_contexts: int, seed: int = SEED) -> Iterator[Exams]:
    rng = np.random.default_rng(seed)
    sizes = [min(_BATCH, num_contexts - first) for first in range(0, num_contexts, _BATCH)]
    lengths = np.linspace(SHORTEST, LONGEST, len(sizes)).round().astype(int).tolist()
    for size, length in zip(sizes, lengths, strict=True):
        yield draw(rng, num_exams=size, num_tokens=length, asked=ASKED)


def trained_kv(num_contexts: int) -> Bits:
    """A whole chunk from each context, bfloat16 as uint16: `[contexts, layers, 2, CHUNK_TOKENS,
    heads, head_dim]`. Raises NotMeasurable.
    """
    subject = _load(None, CHUNK_TOKENS)
    exams = draw(
        np.random.default_rng(SEED), num_exams=num_contexts, num_tokens=LONGEST, asked=ASKED
    )
    kv = subject.prefill(exams.contexts)
    start = CHUNK_TOKENS
    return np.ascontiguousarray(kv[:, :, :, start : start + CHUNK_TOKENS])


def _load(model: str | Path | None, chunk_tokens: int) -> QualitySubject:
    if model is None and (model := find_weights()) is None:
        raise NotMeasurable(
            "the small trained model is in a checkout's benchmarks/quality/model, and this is none"
        )
    try:
        return load_subject(model, tokens_per_chunk=chunk_tokens)
    except ImportError as error:
        raise NotMeasurable(f"{error}; models need pip install 'kvhold[transformers]'") from error
