"""Five documents, and questions whose answers need one or two of them.

    FACT entity value      the entity has this value
    FACT entity symbol     the entity has the symbol's value
    DEFINE symbol value    from here on; a second definition follows the symbol's only use
    word ...               says nothing

    ASK entity entity IS value value END

Definitions are in other documents than the use; the later one is wrong.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

BEGIN, ASK, IS, END, FACT, DEFINE = range(6)
NUM_DOCUMENTS = 5
_NUM_ENTITIES, _NUM_SYMBOLS, NUM_VALUES, _NUM_WORDS = 256, 96, 64, 64
_FIRST_ENTITY = 8
_FIRST_SYMBOL = _FIRST_ENTITY + _NUM_ENTITIES
FIRST_VALUE = _FIRST_SYMBOL + _NUM_SYMBOLS
_FIRST_WORD = FIRST_VALUE + NUM_VALUES
VOCAB_SIZE = _FIRST_WORD + _NUM_WORDS

QUESTION_TOKENS = 4  # up to IS
ANSWER_TOKENS = 3  # with END
NO_LABEL = -100


@dataclass(frozen=True)
class Shape:
    """A document has `document_tokens`, of which 3 a record are not words.

    uses:  symbols, each with one use and two definitions
    facts: entities with a value
    """

    document_tokens: int
    uses: int
    facts: int

    @classmethod
    def of(cls, document_tokens: int) -> "Shape":
        """Records take a quarter of the words; 200 at most."""
        records = min(NUM_DOCUMENTS * (document_tokens - 1) // 4, 200)
        uses = max(1, records // 5)
        return cls(document_tokens, uses, max(1, records - 3 * uses - NUM_DOCUMENTS))


@dataclass(frozen=True)
class Exercise:
    """documents: [NUM_DOCUMENTS, document_tokens]
    resolved:  [NUM_DOCUMENTS, document_tokens], the value of each use, else NO_LABEL
    questions: [questions, QUESTION_TOKENS + ANSWER_TOKENS]
    is_across: [questions, 2], an answer's value is defined in another document
    """

    documents: Tokens
    resolved: Tokens
    questions: Tokens
    is_across: npt.NDArray[np.bool_]


def draw(rng: np.random.Generator, shape: Shape, num_questions: int) -> Exercise:
    """Raises ValueError: too many records for a document."""
    entities = _FIRST_ENTITY + rng.permutation(_NUM_ENTITIES)[: shape.uses + shape.facts]
    symbols = _FIRST_SYMBOL + rng.permutation(_NUM_SYMBOLS)[: shape.uses]
    values = FIRST_VALUE + rng.integers(0, NUM_VALUES, shape.uses + shape.facts)
    others = FIRST_VALUE + rng.integers(0, NUM_VALUES, shape.uses)
    records: list[list[tuple[list[int], int]]] = [[] for _ in range(NUM_DOCUMENTS)]
    for at in range(shape.uses):
        first, use, second = np.sort(rng.permutation(NUM_DOCUMENTS)[:3])
        records[first].append(([DEFINE, symbols[at], values[at]], NO_LABEL))
        records[use].append(([FACT, entities[at], symbols[at]], int(values[at])))
        records[second].append(([DEFINE, symbols[at], others[at]], NO_LABEL))
    for at in range(shape.uses, shape.uses + shape.facts):
        shortest = min(range(NUM_DOCUMENTS), key=lambda number: len(records[number]))
        records[shortest].append(([FACT, entities[at], values[at]], NO_LABEL))
    written = [_write(rng, part, shape.document_tokens) for part in records]
    asked = _ask(rng, shape, num_questions)
    questions = np.full((num_questions, QUESTION_TOKENS + ANSWER_TOKENS), END, np.int64)
    questions[:, 0], questions[:, 3] = ASK, IS
    questions[:, 1:3], questions[:, 4:6] = entities[asked], values[asked]
    return Exercise(
        np.stack([tokens for tokens, _ in written]),
        np.stack([labels for _, labels in written]),
        questions,
        asked < shape.uses,
    )


def _write(
    rng: np.random.Generator, records: list[tuple[list[int], int]], num_tokens: int
) -> tuple[Tokens, Tokens]:
    spare = num_tokens - 1 - 3 * len(records)
    if spare < 0:
        raise ValueError(f"{len(records)} records do not fit into {num_tokens} tokens")
    tokens = np.full(num_tokens, BEGIN, np.int64)
    tokens[1:] = _FIRST_WORD + rng.integers(0, _NUM_WORDS, num_tokens - 1)
    labels = np.full(num_tokens, NO_LABEL, np.int64)
    gaps = np.sort(rng.integers(0, spare + 1, len(records)))
    for number, at in enumerate(rng.permutation(len(records))):
        record, label = records[at]
        start = 1 + 3 * number + gaps[number]
        tokens[start : start + 3] = record
        labels[start + 2] = label
    return tokens, labels


def _ask(rng: np.random.Generator, shape: Shape, num_questions: int) -> Tokens:
    """[questions, 2]: numbers of entities; six of ten have a symbol"""
    count = 2 * num_questions
    uses = rng.integers(0, shape.uses, count)
    facts = shape.uses + rng.integers(0, shape.facts, count)
    return np.where(rng.random(count) < 0.6, uses, facts).reshape(num_questions, 2)
